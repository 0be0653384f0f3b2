"""Python processes that a test starts, talks to by lines, and ends."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import anyio.to_thread


@contextmanager
def child(source: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that runs `source`; killed when the body ends."""
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
    """The next line that a child prints."""
    assert process.stdout is not None
    return (await anyio.to_thread.run_sync(process.stdout.readline)).strip()
