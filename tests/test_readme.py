"""The Python blocks of README and docs run: those of one page are one program, read from top to bottom.

A block may `await` at its top level. Functions named `test_…` are run as tests at the end. A page that starts
processes is run as a script of its own, as its reader would.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^```.*?^```$|`[^`]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
README_LINES = 120


def pages() -> list[Path]:
    """Return README and every page under docs/ with Python, except decisions, whose code is not meant to run."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if "decisions" not in page.parts and BLOCK.search(page.read_text())]


def program(page: Path) -> str:
    """Return all blocks of a page, each at its line, so that a traceback points into the page."""
    text = page.read_text()
    lines = [""] * text.count("\n")
    for block in BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1))
        for offset, line in enumerate(block[1].splitlines()):
            lines[first + offset] = line
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = program(page)

    if "__main__" in source:
        run_as_script(source, tmp_path / f"{page.stem.replace('-', '_')}_page.py")
    else:
        run_here(source, page)


def run_as_script(source: str, path: Path) -> None:
    path.write_text(source)
    ran = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def run_here(source: str, page: Path) -> None:
    """Run the blocks, then the tests that they define; in an event loop only if the blocks await something."""
    module = ModuleType(f"{page.stem.replace('-', '_')}_page")
    code = compile(source, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    try:
        finish(lambda: eval(code, vars(module)), awaits=bool(code.co_flags & inspect.CO_COROUTINE))  # noqa: S307 (ours)
        for name, test in list(vars(module).items()):
            if name.startswith("test_"):
                finish(test, awaits=inspect.iscoroutinefunction(test))
    finally:
        del sys.modules[module.__name__]


def finish(call: Callable[[], Any], *, awaits: bool) -> None:
    async def awaited() -> None:
        await call()

    if awaits:
        asyncio.run(awaited())
    else:
        call()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_every_link_to_a_file_leads_somewhere() -> None:
    everything = [*ROOT.glob("*.md"), ROOT / "examples/README.md", *(ROOT / "docs").rglob("*.md")]
    links = [(page, link) for page in everything for link in LINK.findall(CODE.sub("", page.read_text()))]

    assert not [(page.name, link) for page, link in links if not (page.parent / link).exists()]
