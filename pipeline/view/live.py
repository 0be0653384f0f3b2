"""A run as a live table on the terminal of stderr. What the script prints and logs meanwhile appears above it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import anyio
from rich.console import Console
from rich.live import Live

from ..util.blocking import in_thread
from .snapshot import Watched
from .table import table

REFRESH_S = 0.5


class LiveTable:
    """Draws the table twice a second; see `Display`.

    The cursor stays visible: a process that is killed cannot show it again.
    """

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        console = Console(stderr=True)
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())
        self._stack = ExitStack()

    async def open(self) -> None:
        """Begin to draw, and to print other lines above the table."""
        await in_thread(self._open)

    def _open(self) -> None:
        streams = (sys.stdout, sys.stderr)
        self._stack.enter_context(self._live)
        self._live.console.show_cursor(True)
        self._stack.enter_context(_handlers_follow(streams))

    async def refresh(self) -> None:
        """Draw the table again and again until cancelled."""
        while True:
            await self._draw()
            await anyio.sleep(REFRESH_S)

    async def _draw(self) -> None:
        shown = self._watched.snapshot()
        await in_thread(lambda: self._live.update(table(shown.with_memory()), refresh=True))

    async def close(self) -> None:
        """Draw the table for the last time; it stays on the terminal."""
        try:
            await self._draw()
        finally:
            await in_thread(self._stack.close)


@contextmanager
def _handlers_follow(before: tuple[Any, Any]) -> Iterator[None]:
    """Have log handlers that write to the streams in `before` write to the present ones within the body.

    A handler keeps the stream that it was made with, and its lines would tear the table.
    """
    present = dict(zip(map(id, before), (sys.stdout, sys.stderr), strict=True))
    moved = [
        (handler, handler.setStream(present[id(handler.stream)]))
        for handler in _handlers()
        if id(handler.stream) in present
    ]
    try:
        yield
    finally:
        for handler, stream in moved:
            if stream is not None:
                handler.setStream(stream)


def _handlers() -> Iterator[logging.StreamHandler[Any]]:
    """Yield every handler of the standard library's loggers that writes to a stream."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for logger in loggers:
        for handler in logger.handlers if isinstance(logger, logging.Logger) else ():
            if isinstance(handler, logging.StreamHandler):
                yield handler
