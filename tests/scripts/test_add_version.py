"""The documentation of each version stays, and the first page leads to the newest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripts.docs.add_version import add_version


def test_versions_are_listed_newest_first_and_one_that_is_built_again_replaces_its_pages(tmp_path: Path) -> None:
    site, pages = tmp_path / "site", tmp_path / "pages"
    pages.mkdir()
    for version, text in (("0.9.0", "old"), ("0.10.0", "new"), ("0.9.0", "again")):
        site.mkdir(exist_ok=True)
        (site / "index.html").write_text(text)
        add_version(site, pages, version)

    assert [each["version"] for each in json.loads((pages / "versions.json").read_text())] == ["0.10.0", "0.9.0"]
    assert (pages / "0.9.0/index.html").read_text() == "again"
    assert 'url=0.10.0/index.html"' in (pages / "index.html").read_text()


@pytest.mark.parametrize("version", ["", "v0.1.0", "../0.1.0", "0.1"])
def test_a_name_that_is_no_version_is_refused(version: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a version such as 0\.1\.0"):
        add_version(tmp_path, tmp_path, version)
