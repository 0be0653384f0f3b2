"""Names of Hugging Face's hub, `Qwen/Qwen2.5-0.5B` or `openai/gsm8k/main/train`, as local paths.

A path that exists is local, whatever its form. Other names in the form owner/name are downloaded into the cache of
huggingface_hub.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeAlias, TypeVar

from ..._schemas.config import nearest
from ..errors import InvalidConfig, MissingExtra

T = TypeVar("T")

Kind: TypeAlias = Literal["model", "dataset"]

Sets: TypeAlias = Callable[[Iterable[PurePosixPath]], Mapping[str, list[PurePosixPath]]]
"""Returns the files of a data set by the path of their set."""

MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
UNUSED_FILES = ("original/*", "onnx/*", "consolidated*")
"""The same weights in other formats."""

LISTED = 8
"""Names that a message has, at most."""

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(/[\w.-]+)*")
_FILE = re.compile(r".*\.(jsonl?|parquet|csv|tsv|gz|zst|txt|yaml)", re.IGNORECASE)


def is_hub_name(text: str, folder: Path) -> bool:
    """Return whether `text` has the form of a name of the hub, and its first part is no name in `folder`."""
    first, _, rest = text.partition("/")
    is_file = "/" not in rest and _FILE.fullmatch(rest) is not None
    return _NAME.fullmatch(text) is not None and not is_file and not (folder / first).exists()


def absent(path: Path) -> str:
    """Return whether a file is at `path`, with the nearest name beside it, as the end of an error message."""
    if path.exists():
        return "a file"
    missing = next((each for each in [*reversed(path.parents), path] if not each.exists()), path)
    try:
        beside = [each.name for each in missing.parent.iterdir()]
    except OSError:
        beside = []
    return f"nothing there (looked from {Path.cwd()}){nearest(missing.name, beside)}"


def model_folder(name: str) -> str:
    """Return the folder of a model; one of the hub is downloaded. Blocks.

    Raises:
        InvalidConfig: it cannot be downloaded.
        MissingExtra: huggingface_hub is not installed.
    """
    if not is_hub_name(name, Path()):
        return name
    return _called(name, "model", lambda hub: _snapshot(hub, name, "model", [*MODEL_FILES], [*UNUSED_FILES]))


def dataset_path(name: str, sets_of: Sets) -> str:
    """Return the path of a set of data; one of the hub, `owner/name` or with a set in it, is downloaded. Blocks.

    Raises:
        InvalidConfig: it cannot be downloaded, or it has several sets.
        MissingExtra: huggingface_hub is not installed.
    """
    return _downloaded_set(name, sets_of) if is_hub_name(name, Path()) else name


@cache
def _downloaded_set(name: str, sets_of: Sets) -> str:
    owner, title, *within = name.split("/")
    repository, path = f"{owner}/{title}", "/".join(within)
    sets = sets_of(map(PurePosixPath, _called(name, "dataset", lambda hub: _names(hub, repository))))
    chosen = {key: files for key, files in sets.items() if not path or path in {key, *map(str, files)}}
    if len(chosen) != 1:
        known = ", ".join(f"{repository}/{key}" for key in sorted(sets)[:LISTED]) or "no file of JSON lines or Parquet"
        raise InvalidConfig(f"{name}: expected one set of the hub, got {len(chosen)}: take one of {known}")
    ((key, files),) = chosen.items()
    wanted = [path] if path in map(str, files) else [str(file) for file in files]
    folder = _called(name, "dataset", lambda hub: _snapshot(hub, repository, "dataset", wanted))
    return str(Path(folder) / (path if wanted == [path] else key))


def _names(hub: Any, repository: str) -> list[str]:
    """Return the files of a set of data, without a network those that were downloaded."""
    try:
        return [*hub.list_repo_files(repository, repo_type="dataset")]
    except Exception:
        try:
            folder = Path(hub.snapshot_download(repository, repo_type="dataset", local_files_only=True))
        except Exception:  # noqa: BLE001 (there is none; the first error says why)
            folder = None
        if folder is None:
            raise
        return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _snapshot(hub: Any, name: str, kind: Kind, wanted: list[str], unused: Sequence[str] = ()) -> str:
    folder = hub.snapshot_download(name, repo_type=kind, allow_patterns=wanted, ignore_patterns=list(unused))
    return str(folder)


def _called(name: str, kind: Kind, call: Callable[[Any], T]) -> T:
    """Return the result of `call` with huggingface_hub; its errors are explained."""
    repository = name if kind == "model" else "/".join(name.split("/")[:2]) + " --repo-type dataset"
    try:
        import huggingface_hub  # noqa: PLC0415 (optional)
    except ImportError:
        raise MissingExtra(
            f"{name}: a name of Hugging Face's hub needs huggingface_hub, which is not installed: pip install "
            f"huggingface_hub, or give a folder: hf download {repository} --local-dir FOLDER"
        ) from None
    try:
        return call(huggingface_hub)
    except Exception as error:  # the library raises those of several others
        said = " ".join(str(error).split())[:200]
        raise InvalidConfig(
            f"{name}: expected a folder or a name of Hugging Face's hub, got {absent(Path(name))}, and from the hub "
            f"{type(error).__name__}: {said}"
        ) from error
