"""Every public name has a docstring and is mentioned in the pages; examples in docstrings run."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
from pathlib import Path

from tests.public_surface import public_names

ROOT = Path(__file__).parent.parent


def modules() -> dict[str, str]:
    """Return the source of every module of the package, by import name."""
    folders = ("schemas", "pipeline", "stages")
    paths = [path.relative_to(ROOT) for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    names = [f"penstock._{'.'.join(path.with_suffix('').parts)}".removesuffix(".__init__") for path in paths]
    return {name: (ROOT / path).read_text() for name, path in zip(names, paths, strict=True)}


def pages() -> str:
    return "\n".join(path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))])


def test_every_public_name_has_a_docstring_of_its_own() -> None:
    without = [name for name, value in public_names() if not has_a_docstring_of_its_own(name, value)]

    assert not without, "\n".join(without)


def has_a_docstring_of_its_own(name: str, value: object) -> bool:
    """Return whether `value` has a docstring, other than the signature that a dataclass makes up."""
    if not (inspect.isroutine(value) or inspect.isclass(value)):
        return True  # a type alias
    written = inspect.getdoc(value)
    return written is not None and written != "" and not written.startswith(f"{name}(")


def test_every_public_name_is_mentioned_in_the_docs() -> None:
    words = set(re.findall(r"\w+", pages()))

    assert [name for name, _ in public_names() if name not in words] == []


NAMED_TEST = re.compile(r"\[(test_\w+)\]\(([\w./-]+\.py)\)")


def test_every_test_that_a_page_names_exists() -> None:
    named = [
        (page, *found)
        for page in sorted((ROOT / "docs").rglob("*.md"))
        for found in NAMED_TEST.findall(page.read_text())
    ]

    absent = [f"{page.name}: {name}" for page, name, file in named if f"def {name}(" not in text_of(page.parent / file)]
    assert not absent, "\n".join(absent)


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_each_finding_of_the_audit_names_its_test() -> None:
    section = (
        (ROOT / "docs" / "reliability.md").read_text().partition("## What an audit found")[2].partition("\n## ")[0]
    )
    rows = [row.split(" | ") for row in section.splitlines() if re.match(r"\| \d", row)]

    assert [row[0][2:5] for row in rows] == ["454", "455", "455", "456", "457", "458", "459", "460", "461"]
    assert [row[0] for row in rows if len(row) != 3 or not NAMED_TEST.search(row[2])] == []


def test_examples_in_docstrings_run() -> None:
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    names = [name for name, source in modules().items() if ">>> " in source]

    wrong = [name for name in names if doctest.testmod(importlib.import_module(name), optionflags=flags).failed]

    assert len(names) > 50
    assert not wrong, "\n".join(wrong)


def test_every_module_has_a_docstring() -> None:
    without = [name for name, source in modules().items() if not ast.get_docstring(ast.parse(source))]

    assert not without, "\n".join(without)


def test_each_message_that_a_new_user_may_see_is_one_of_the_code() -> None:
    section = (ROOT / "docs/training.md").read_text().partition("## What you may see")[2].partition("\n## ")[0]
    shown = [row.split(" | ")[0] for row in section.splitlines() if row.startswith("| ")][1:]
    code = "\n".join(modules().values())
    said = [said for row in shown for said in re.findall(r'`([\w/]+)`|"([^"]+)"', row)]

    assert len(shown) >= 15
    assert [name or text for name, text in said if not re.search(rf"\b{re.escape(name or text)}\b", code)] == []
