"""The command that installs an extra follows how penstock was installed, and asks no index for the name penstock."""

from __future__ import annotations

import json
import re
import shlex
import sys
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path
from typing import Any

import pytest

from penstock._pipeline.util.installation import command_for, install_command

ROOT = Path(__file__).resolve().parents[3]

METADATA = """Metadata-Version: 2.4
Name: penstock
Version: 0.1.0
Requires-Dist: numpy>=2.0
Requires-Dist: torch>=2.6; extra == "torch"
Requires-Dist: tokenizers>=0.20; extra == "tokenizers"
Requires-Dist: penstock[tokenizers,torch]; extra == "train"
Requires-Dist: peft>=0.18; extra == "train"
Requires-Dist: skyrl>=0.4; python_version >= "3.12" and extra == "skyrl"
"""


def installed(folder: Path, origin: Any = None) -> Distribution:
    """Return penstock as an installer leaves it: with `direct_url.json`, unless it came from an index."""
    info = folder / "penstock-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    if origin is not None:
        (info / "direct_url.json").write_text(origin if isinstance(origin, str) else json.dumps(origin))
    return PathDistribution(info)


def test_a_checkout_is_installed_again_as_it_was(tmp_path: Path) -> None:
    checkout = tmp_path / "my checkout"
    checkout.mkdir()
    url = checkout.as_uri()

    editable = command_for(installed(tmp_path, {"url": url, "dir_info": {"editable": True}}), "http")
    (checkout / "other").mkdir()
    plain = command_for(installed(checkout / "other", {"url": url, "dir_info": {}}), "http")

    assert shlex.split(editable) == ["pip", "install", "-e", f"{checkout}[http]"]
    assert shlex.split(plain) == ["pip", "install", f"{checkout}[http]"]


@pytest.mark.parametrize(("asked", "revision"), [("main", "main"), (None, "0f1e2d")])
def test_a_repository_is_installed_at_its_revision(tmp_path: Path, asked: str | None, revision: str) -> None:
    vcs = {"vcs": "git", "commit_id": "0f1e2d"} | ({} if asked is None else {"requested_revision": asked})
    origin = {"url": "https://example.org/penstock.git", "vcs_info": vcs}

    command = command_for(installed(tmp_path, origin), "train")

    assert shlex.split(command)[2:] == [f"penstock[train] @ git+https://example.org/penstock.git@{revision}"]


def test_a_wheel_is_installed_from_its_file(tmp_path: Path) -> None:
    wheel = tmp_path / "penstock-0.1.0-py3-none-any.whl"
    wheel.touch()

    command = command_for(installed(tmp_path, {"url": wheel.as_uri(), "archive_info": {}}), "math")

    assert shlex.split(command)[2:] == [f"penstock[math] @ {wheel.as_uri()}"]


@pytest.mark.parametrize(
    "origin",
    [
        None,
        {"url": "file:///a/folder/that/is/gone", "dir_info": {"editable": True}},
        {"url": "file:///tmp/gone/penstock-0.1.0-py3-none-any.whl", "archive_info": {}},
        "no JSON",
        {"dir_info": {}},
    ],
)
def test_the_packages_are_listed_where_the_origin_is_unknown_or_gone(tmp_path: Path, origin: Any) -> None:
    penstock = installed(tmp_path, origin)

    assert shlex.split(command_for(penstock, "train")) == [
        "pip",
        "install",
        "tokenizers>=0.20",
        "torch>=2.6",
        "peft>=0.18",
    ]
    assert shlex.split(command_for(penstock, "skyrl")) == ["pip", "install", "skyrl>=0.4"]


def test_the_metadata_of_a_build_do_not_hide_those_of_the_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, site = tmp_path / "src", tmp_path / "site-packages"
    site.mkdir()
    (built / "penstock.egg-info").mkdir(parents=True)
    (built / "penstock.egg-info" / "PKG-INFO").write_text(METADATA)
    installed(site, {"url": tmp_path.as_uri(), "dir_info": {"editable": True}})
    monkeypatch.setattr(sys, "path", [str(built), str(site)])

    assert install_command("http") == f"pip install -e '{tmp_path}[http]'"


def test_this_penstock_gives_a_command_of_its_own_origin() -> None:
    assert re.fullmatch(r"pip install (-e )?'.+\[http\]( @ .+)?'|pip install 'aiohttp.*'", install_command("http"))


@pytest.mark.parametrize("folder", ["docs", "stages", "pipeline", "src", "examples"])
def test_no_page_and_no_message_installs_by_the_name_alone(folder: str) -> None:
    texts = [path for kind in ("*.md", "*.py") for path in (ROOT / folder).rglob(kind)]
    by_name = re.compile(r"pip\s+install\s+(-\S+\s+)?(penstock\b|(['\"])penstock(\[[\w,]+\])?\3)")

    assert [str(path) for path in texts if by_name.search(path.read_text())] == []
