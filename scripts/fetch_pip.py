"""Installs pip into the environment that runs this, from the package index, with the standard library alone.

For machines where `python3 -m venv` has no ensurepip, as on Debian without python3-venv. The index is the one pip
would use: PIP_INDEX_URL, else `index-url` of pip's configuration files, else pypi.org. A wheel of pip can run itself.
"""

from __future__ import annotations

import configparser
import hashlib
import os
import re
import ssl
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

PYPI = "https://pypi.org/simple"
WHEEL = re.compile(r"pip-(\d+(?:\.\d+)*)-(?:py2\.)?py3-none-any\.whl$")
OLDEST_PYTHON = re.compile(r">=\s*3\.(\d+)")


class Wheel(NamedTuple):
    """A final release of pip, as the index lists it."""

    version: tuple[int, ...]
    url: str
    """Absolute, with the hash as its fragment where the index gives one."""


class _Links(HTMLParser):
    """Collects the attributes of every <a> of an index page (PEP 503)."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[dict[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep what an anchor says."""
        if tag == "a":
            self.links.append({name: value or "" for name, value in attrs})


def wheels(page: str, page_url: str, python_minor: int) -> list[Wheel]:
    """The wheels of pip on an index page that run on Python 3.`python_minor`: no pre-releases, none that was yanked."""
    parser = _Links()
    parser.feed(page)
    found: list[Wheel] = []
    for link in parser.links:
        url = urllib.parse.urljoin(page_url, link.get("href", ""))
        name = WHEEL.search(urllib.parse.urlsplit(url).path)
        oldest = OLDEST_PYTHON.search(link.get("data-requires-python", ""))
        if name and "data-yanked" not in link and (oldest is None or int(oldest[1]) <= python_minor):
            found.append(Wheel(tuple(map(int, name[1].split("."))), url))
    return found


def newest(candidates: Iterable[Wheel], page_url: str) -> Wheel:
    """The wheel with the highest version.

    Raises:
        SystemExit: there is none.
    """
    chosen = max(candidates, default=None)
    if chosen is None:
        raise SystemExit(f"fetch_pip: expected a wheel of pip at {page_url}, found none; is this a package index?")
    return chosen


def index_url(environment: dict[str, str], configuration_files: Iterable[Path]) -> str:
    """The package index that pip would use, without its final slash."""
    config = configparser.RawConfigParser()
    config.read(configuration_files)
    configured = config.get("global", "index-url", fallback=PYPI)
    return (environment.get("PIP_INDEX_URL") or configured).rstrip("/")


def _configuration_files() -> list[Path]:
    """Where pip looks, later files overriding earlier ones."""
    home = Path.home()
    user = Path(os.environ.get("XDG_CONFIG_HOME", home / ".config"))
    listed = [Path("/etc/xdg/pip/pip.conf"), Path("/etc/pip.conf"), home / ".pip/pip.conf", user / "pip/pip.conf"]
    return [*listed, Path(os.environ["PIP_CONFIG_FILE"])] if "PIP_CONFIG_FILE" in os.environ else listed


def _get(url: str) -> bytes:
    """The body at `url`, certificates checked against PIP_CERT where that is set."""
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    with urllib.request.urlopen(url, timeout=60, context=context) as response:  # noqa: S310 (the index the user configured)
        body: bytes = response.read()
    return body


def _check_hash(body: bytes, fragment: str) -> None:
    """Refuse a download that is not what the index promised.

    Raises:
        SystemExit: the hash differs.
    """
    algorithm, _, expected = fragment.partition("=")
    if expected and hashlib.new(algorithm, body).hexdigest() != expected:
        raise SystemExit(f"fetch_pip: expected pip with {fragment}, got another file; try again, or another index")


def main() -> None:
    """Find the newest pip, fetch it, and let it install itself."""
    page_url = index_url(dict(os.environ), _configuration_files()) + "/pip/"
    wheel = newest(wheels(_get(page_url).decode(), page_url, sys.version_info.minor), page_url)
    parts = urllib.parse.urlsplit(wheel.url)
    body = _get(wheel.url)
    _check_hash(body, parts.fragment)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, parts.path.rpartition("/")[2])
        path.write_bytes(body)
        subprocess.run([sys.executable, path / "pip", "install", "--no-index", path], check=True)


if __name__ == "__main__":
    main()
