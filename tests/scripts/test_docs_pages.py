"""The documentation site: every page in its order, every link to something on the site, every public module."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts.docs.collect_pages import ROOT, collect, places, public_modules, relinked

from penstock import __version__

PLACES = {"README.md": "index.md", "docs/weights.md": "weights.md", "docs/stages/batcher.md": "stages/batcher.md"}


@pytest.fixture(scope="module")
def site() -> dict[str, str]:
    return collect(ROOT)


def test_every_page_has_one_place_in_the_reading_order(site: dict[str, str]) -> None:
    listed = re.findall(r"\]\(([^)]+)\)", site["SUMMARY.md"])

    assert sorted(listed) == sorted(place for place in site if not place.startswith(("source/", "SUMMARY.md")))


def test_the_site_says_its_version(site: dict[str, str]) -> None:
    assert site["SUMMARY.md"].startswith(f"- [penstock {__version__}](index.md)\n")


def test_every_decision_is_listed_by_its_own_title() -> None:
    titles = {path.read_text().splitlines()[0].removeprefix("# ") for path in (ROOT / "docs/decisions").glob("*.md")}

    assert titles <= set(re.findall(r"\[([^\]]+)\]", (ROOT / "docs/SUMMARY.md").read_text()))


def test_every_public_module_has_a_page_that_names_it_for_mkdocstrings(site: dict[str, str]) -> None:
    modules = public_modules((ROOT / "docs/names.md").read_text())

    assert {"penstock", "penstock.errors", "penstock.testing"} <= set(modules)
    assert [module for module in modules if f"\n::: {module}\n" not in site[f"reference/{module}.md"]] == []


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("README.md", "[weights](docs/weights.md#traps)", "[weights](weights.md#traps)"),
        ("docs/stages/batcher.md", "[it](../weights.md)", "[it](../weights.md)"),
        ("docs/weights.md", "[start](../README.md)", "[start](index.md)"),
        ("docs/stages/batcher.md", "[m](../../Makefile)", "[m](../source/Makefile.md)"),
        ("docs/weights.md", "[cases](../tests)", "cases"),
        ("README.md", "![a run](docs/images/run.svg)", "![a run](images/run.svg)"),
        ("docs/stages/batcher.md", "![a run](../images/run.svg)", "![a run](../images/run.svg)"),
        ("docs/weights.md", "[pip](https://pip.pypa.io)", "[pip](https://pip.pypa.io)"),
        ("docs/weights.md", "`x[0](1)`", "`x[0](1)`"),
        ("docs/weights.md", "```\nx[0](1)\n```", "```\nx[0](1)\n```"),
    ],
)
def test_a_link_leads_to_the_place_on_the_site(page: str, text: str, expected: str) -> None:
    assert relinked(text, page, PLACES, ROOT) == expected


def test_a_file_that_a_page_links_to_is_shown_on_a_page_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/SUMMARY.md").write_text("- [Names](names.md)\n")
    (tmp_path / "docs/names.md").write_text("# Names\n\n[a test](../check.py)\n")
    (tmp_path / "check.py").write_text("assert True\n")
    (tmp_path / "src/penstock").mkdir(parents=True)
    (tmp_path / "src/penstock/__init__.py").write_text('__version__ = "1.2.3"\n')
    monkeypatch.setattr("scripts.docs.collect_pages.OUTSIDE_DOCS", {})

    site = collect(tmp_path)

    assert site["names.md"] == "# Names\n\n[a test](source/check.py.md)\n"
    assert "~~~~ python\nassert True\n~~~~" in site["source/check.py.md"]
    assert places(tmp_path) == {"docs/SUMMARY.md": "SUMMARY.md", "docs/names.md": "names.md"}
