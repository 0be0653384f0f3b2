"""Fetch pip from the package index where `python3 -m venv` installs none."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from scripts.fetch_pip import Wheel, index_url, newest, wheels

SCRIPT = Path(__file__).parent.parent.parent / "scripts/fetch_pip.py"
PAGE_URL = "https://index.example/simple/pip/"


def link(name: str, attributes: str = "") -> str:
    return f'<a href="../../files/{name}" {attributes}>{name}</a>'


def test_the_highest_version_wins_by_number_not_by_letter() -> None:
    page = (
        link("pip-9.0.3-py2.py3-none-any.whl") + link("pip-26.3-py3-none-any.whl") + link("pip-26.10-py3-none-any.whl")
    )

    chosen = newest(wheels(page, PAGE_URL, python_minor=11), PAGE_URL)

    assert chosen == Wheel((26, 10), "https://index.example/files/pip-26.10-py3-none-any.whl")


@pytest.mark.parametrize(
    "unfit",
    [
        link("pip-27.0.tar.gz"),
        link("pip-27.0b1-py3-none-any.whl"),
        link("pip-27.0-py3-none-any.whl", 'data-yanked=""'),
        link("pip-27.0-py3-none-any.whl", 'data-requires-python="&gt;=3.12"'),
    ],
    ids=["no wheel", "pre-release", "yanked", "needs a newer Python"],
)
def test_a_release_that_does_not_fit_is_passed_over(unfit: str) -> None:
    page = link("pip-26.3-py3-none-any.whl", 'data-requires-python="&gt;=3.10"') + unfit

    assert [wheel.version for wheel in wheels(page, PAGE_URL, python_minor=11)] == [(26, 3)]


def test_an_index_without_pip_is_named() -> None:
    with pytest.raises(SystemExit, match=PAGE_URL):
        newest([], PAGE_URL)


def test_the_index_is_the_one_pip_would_use(tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = https://configured.example/simple/\n")
    files = [tmp_path / "absent.conf", tmp_path / "pip.conf"]

    assert index_url({"PIP_INDEX_URL": "https://named.example/simple"}, files) == "https://named.example/simple"
    assert index_url({}, files) == "https://configured.example/simple"
    assert index_url({}, []) == "https://pypi.org/simple"


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """Serve a package index on loopback, with a pip that writes its arguments to a file."""
    folder = tmp_path / "index/pip"
    folder.mkdir(parents=True)
    wheel = folder / "pip-99.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pip/__main__.py", "import sys; print('called with', *sys.argv[1:3])")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (folder / "index.html").write_text(f'<a href="{wheel.name}#sha256={digest}">pip</a>')
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path / "index")
    ) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


def fetch(index: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PIP_INDEX_URL": index, "no_proxy": "127.0.0.1"}
    return subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=False)


def test_the_wheel_of_pip_installs_itself(index: str) -> None:
    ran = fetch(index)

    assert ran.stdout.strip() == "called with install --no-index", ran.stderr


def test_a_wheel_that_differs_from_its_hash_is_never_run(index: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "index/pip/pip-99.0-py3-none-any.whl", "a") as archive:
        archive.writestr("added", "by somebody else")

    ran = fetch(index)

    assert ran.returncode == 1
    assert "expected pip with sha256=" in ran.stderr
    assert not ran.stdout
