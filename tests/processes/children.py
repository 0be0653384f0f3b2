"""Python processes that a test starts, talks to by lines, and ends."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio.to_thread


def children_of(pid: int) -> list[int]:
    """Return the processes that the threads of `pid` started, zombies included."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread ended meanwhile
            found += map(int, children.read_text().split())
    return found


@contextmanager
def child(source: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start a Python process that runs `source`, and kill it when the body ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


async def line(process: subprocess.Popen[str]) -> str:
    """Return the next line that a child prints."""
    assert process.stdout is not None
    return (await anyio.to_thread.run_sync(process.stdout.readline)).strip()
