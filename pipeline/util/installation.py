"""The command that installs an extra: it follows how penstock itself was installed.

penstock is in no package index, and anyone may take its name there, so a command never asks one for it: it gives the
folder, the repository or the file that penstock came from. If that is unknown, it gives the packages of the extra.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import msgspec

from ..._schemas.conversion import decode_json

if TYPE_CHECKING:
    from importlib.metadata import Distribution

NAME = "penstock"


class _Vcs(msgspec.Struct, frozen=True):
    vcs: str
    commit_id: str
    requested_revision: str = ""


class _Folder(msgspec.Struct, frozen=True):
    editable: bool = False


class _Origin(msgspec.Struct, frozen=True):
    """The content of `direct_url.json` (PEP 610), written by installers for packages that no index has."""

    url: str
    vcs_info: _Vcs | None = None
    dir_info: _Folder | None = None


def install_command(extra: str) -> str:
    """Return the command that installs `extra` beside this penstock.

    >>> install_command("http").startswith("pip install ")
    True
    """
    from importlib.metadata import distributions  # noqa: PLC0415 (it takes 60 ms, and few processes lack an extra)

    found = list(distributions(name=NAME))
    if not found:  # on the path of modules
        checkout = Path(__file__).resolve().parents[2]
        return f"pip install '{checkout}[{extra}]'"
    # An editable installation leaves metadata without an origin in src/ too, which may be earlier on the path.
    return command_for(next(filter(_origin, found), found[0]), extra)


def command_for(installed: Distribution, extra: str) -> str:
    """Return the command that installs `extra` beside `installed`."""
    origin = _origin(installed)
    if origin is None or _is_gone(origin):
        return f"pip install {' '.join(_packages(installed, extra))}"
    if origin.vcs_info is not None:
        revision = origin.vcs_info.requested_revision or origin.vcs_info.commit_id
        return f"pip install '{NAME}[{extra}] @ {origin.vcs_info.vcs}+{origin.url}@{revision}'"
    if origin.dir_info is None:
        return f"pip install '{NAME}[{extra}] @ {origin.url}'"
    return f"pip install {'-e ' if origin.dir_info.editable else ''}'{_path(origin)}[{extra}]'"


def _origin(installed: Distribution) -> _Origin | None:
    """Return the origin of `installed`; None if it came from an index."""
    text = installed.read_text("direct_url.json")
    try:
        return None if text is None else decode_json(text, _Origin)
    except msgspec.DecodeError:
        return None


def _path(origin: _Origin) -> Path:
    return Path(unquote(urlsplit(origin.url).path))


def _is_gone(origin: _Origin) -> bool:
    """Return whether the folder or the file was moved, as those of a temporary build are."""
    return origin.url.startswith("file:") and not _path(origin).exists()


def _packages(installed: Distribution, extra: str) -> Iterator[str]:
    """Yield the requirements of `extra`, quoted for a shell, those of the extras that it consists of included."""
    for requirement in installed.requires or ():
        package, _, marker = (part.strip() for part in requirement.partition(";"))
        if f'extra == "{extra}"' not in marker.replace("'", '"'):
            continue
        name, _, rest = package.partition("[")
        if name == NAME:
            for each in rest.partition("]")[0].split(","):
                yield from _packages(installed, each.strip())
        else:
            yield f"'{package}'"
