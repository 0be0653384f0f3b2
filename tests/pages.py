"""The Python blocks of a page as one program: `python tests/pages.py docs/data.md` runs it as its reader would.

A block may `await` at its top level. Functions named `test_…` are run as tests at the end.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def program(page: Path) -> str:
    """Return all blocks of a page, each at its line, so that a traceback points into the page."""
    text = page.read_text()
    lines = [""] * text.count("\n")
    for block in BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1))
        for offset, line in enumerate(block[1].splitlines()):
            lines[first + offset] = line
    return "\n".join(lines) + "\n"


def run_page(page: Path) -> None:
    """Run the blocks, then the tests that they define; in an event loop only if the blocks await something."""
    module = ModuleType(f"{page.stem.replace('-', '_')}_page")
    code = compile(program(page), str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    try:
        finish(lambda: eval(code, vars(module)), awaits=bool(code.co_flags & inspect.CO_COROUTINE))  # noqa: S307 (ours)
        for name, test in list(vars(module).items()):
            if name.startswith("test_"):
                finish(test, awaits=inspect.iscoroutinefunction(test))
    finally:
        del sys.modules[module.__name__]


def finish(call: Callable[[], Any], *, awaits: bool) -> None:
    """Call, and await what it returns if it `awaits`."""

    async def awaited() -> None:
        await call()

    if awaits:
        asyncio.run(awaited())
    else:
        call()


if __name__ == "__main__":
    run_page(Path(sys.argv[1]))
