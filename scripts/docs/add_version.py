"""Add the site of a version to a folder with those of all versions, as the theme's selector of versions expects it.

    pages/0.1.0/…          the site, as `make docs` builds it
    pages/versions.json    all versions, newest first
    pages/index.html       leads to the newest

Usage: python scripts/docs/add_version.py build/site pages 0.1.0
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

VERSION = re.compile(r"\d+\.\d+\.\d+")

REDIRECT = (
    '<!doctype html>\n<meta charset="utf-8">\n<meta http-equiv="refresh" content="0; url={version}/index.html">\n'
)


def add_version(site: Path, pages: Path, version: str) -> None:
    """Put `site` into `pages` as that of `version`, in place of an earlier one, and list all versions.

    Raises:
        ValueError: `version` is not of three numbers.
    """
    if VERSION.fullmatch(version) is None:
        raise ValueError(f"expected a version such as 0.1.0, got {version!r}")
    shutil.rmtree(pages / version, ignore_errors=True)
    shutil.copytree(site, pages / version)
    found = [path.name for path in pages.iterdir() if VERSION.fullmatch(path.name)]
    versions = sorted(found, key=lambda name: [int(part) for part in name.split(".")], reverse=True)
    listed = [{"version": each, "title": each, "aliases": []} for each in versions]
    (pages / "versions.json").write_text(json.dumps(listed, indent=2) + "\n")
    (pages / "index.html").write_text(REDIRECT.format(version=versions[0]))


if __name__ == "__main__":
    add_version(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
