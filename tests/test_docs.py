"""Every public name has a docstring and is mentioned in the pages; examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest
from tests.public_surface import public_names

ROOT = Path(__file__).parent.parent


def modules() -> list[str]:
    """Return every module of the package, by import name."""
    folders = ("schemas", "pipeline", "stages")
    paths = [path.relative_to(ROOT) for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [f"penstock._{'.'.join(path.with_suffix('').parts)}".removesuffix(".__init__") for path in paths]


def pages() -> str:
    return "\n".join(path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))])


@pytest.mark.parametrize(("name", "value"), public_names(), ids=lambda each: each if isinstance(each, str) else "")
def test_every_public_name_has_a_docstring_of_its_own(name: str, value: object) -> None:
    written = inspect.getdoc(value) if inspect.isroutine(value) or inspect.isclass(value) else "a type alias"

    assert written
    assert not written.startswith(f"{name}("), "expected a sentence, got the signature that a dataclass makes up"


def test_every_public_name_is_mentioned_in_the_docs() -> None:
    words = set(re.findall(r"\w+", pages()))

    assert [name for name, _ in public_names() if name not in words] == []


NAMED_TEST = re.compile(r"\[(test_\w+)\]\(([\w./-]+\.py)\)")


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    named = NAMED_TEST.findall(page.read_text())

    assert [name for name, file in named if f"def {name}(" not in (page.parent / file).read_text()] == []


def test_each_finding_of_the_audit_names_its_test() -> None:
    section = (
        (ROOT / "docs" / "reliability.md").read_text().partition("## What an audit found")[2].partition("\n## ")[0]
    )
    rows = [row.split(" | ") for row in section.splitlines() if re.match(r"\| \d", row)]

    assert [row[0][2:5] for row in rows] == ["454", "455", "455", "456", "457", "458", "459", "460", "461"]
    assert [row[0] for row in rows if len(row) != 3 or not NAMED_TEST.search(row[2])] == []


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings_run(name: str) -> None:
    module = importlib.import_module(name)

    failed, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)

    assert failed == 0


@pytest.mark.parametrize("name", modules())
def test_every_module_has_a_docstring(name: str) -> None:
    assert importlib.import_module(name).__doc__


def test_each_message_that_a_new_user_may_see_is_one_of_the_code() -> None:
    section = (ROOT / "docs/training.md").read_text().partition("## What you may see")[2].partition("\n## ")[0]
    shown = [row.split(" | ")[0] for row in section.splitlines() if row.startswith("| ")][1:]
    code = "\n".join(
        path.read_text() for folder in ("schemas", "pipeline", "stages") for path in (ROOT / folder).rglob("*.py")
    )
    said = [said for row in shown for said in re.findall(r'`([\w/]+)`|"([^"]+)"', row)]

    assert len(shown) >= 15
    assert [name or text for name, text in said if not re.search(rf"\b{re.escape(name or text)}\b", code)] == []
