"""Run the cells of a notebook without Jupyter: `python -c "$(cat tests/notebooks.py)" NOTEBOOK`.

Cells are code of `__main__`, which is in no file, as in a kernel: one event loop runs them, they may await, and a line
that begins with `!` is a command.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any


async def run_cells(cells: list[dict[str, Any]], namespace: dict[str, Any]) -> None:
    """Run the cells that are code, in order."""
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            await _run("".join(cell["source"]), f"<cell {number}>", namespace)


async def _run(source: str, name: str, namespace: dict[str, Any]) -> None:
    if source.startswith("!"):
        subprocess.run(source.removeprefix("!"), shell=True, check=True)  # noqa: ASYNC221, S602 (a line of the notebook)
        return
    code = compile(source, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    returned = eval(code, namespace)  # noqa: S307 (a cell of the notebook)
    if inspect.iscoroutine(returned):
        await returned


if __name__ == "__main__":
    asyncio.run(run_cells(json.loads(Path(sys.argv[1]).read_text())["cells"], globals()))
