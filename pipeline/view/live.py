"""A run as a live table on the terminal of stderr. The output and the logs of the script appear above it."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO, Any

import anyio
from rich.console import Console
from rich.file_proxy import FileProxy
from rich.live import Live

from ..util.blocking import in_thread
from .snapshot import Snapshot, Watched
from .table import table

REFRESH_S = 0.5


class LiveTable:
    """Draws the table twice a second; see `Display`.

    The cursor stays visible: a process that is killed cannot show it again.
    """

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._writing = threading.RLock()
        self._stack = ExitStack()

    async def open(self) -> None:
        """Begin to draw, and to print other lines above the table."""
        await in_thread(self._open)

    def _open(self) -> None:
        if self._console.is_terminal:
            self._stack.enter_context(_printed_above(self._console, self._writing))
        with self._writing:
            self._live.start()
            self._console.show_cursor(True)

    async def refresh(self) -> None:
        """Draw the table again and again until cancelled."""
        while True:
            await self._draw()
            await anyio.sleep(REFRESH_S)

    async def _draw(self) -> None:
        shown = self._watched.snapshot()
        await in_thread(self._update, shown)

    def _update(self, shown: Snapshot) -> None:
        drawn = table(self._watched.completed(shown))
        with self._writing:
            self._live.update(drawn, refresh=True)

    async def close(self) -> None:
        """Draw the table for the last time; it stays on the terminal."""
        try:
            await self._draw()
        finally:
            await in_thread(self._close)

    def _close(self) -> None:
        with self._writing:
            self._live.stop()
        self._stack.close()  # without the lock: a handler that waits for it holds one of its own


class _Above(FileProxy):
    """Prints lines above the table, each between two drawings of it.

    rich composes its output before it takes a lock. So two threads could write in another order than they composed, and
    a line would be appended to the table, and erased with it.
    """

    def __init__(self, console: Console, file: IO[str], writing: threading.RLock) -> None:
        super().__init__(console, file)
        self._writing = writing

    def write(self, text: str) -> int:
        """Print the lines that `text` completes."""
        with self._writing:
            return super().write(text)

    def flush(self) -> None:
        """Print a line that is not complete yet."""
        with self._writing:
            super().flush()


@contextmanager
def _printed_above(console: Console, writing: threading.RLock) -> Iterator[None]:
    """Print the output of stdout, stderr and log handlers to the terminal above the table within the body.

    A handler keeps the stream that it was made with.
    """
    replaced = {"stderr": sys.stderr} | ({"stdout": sys.stdout} if sys.stdout.isatty() else {})
    above = {id(stream): _Above(console, stream, writing) for stream in replaced.values()}
    for name, stream in replaced.items():
        setattr(sys, name, above[id(stream)])
    # After that: the stream of `logging.lastResort` is sys.stderr at any time, and cannot be set.
    moved = [
        (handler, handler.setStream(above[id(handler.stream)]))
        for handler in _handlers()
        if id(handler.stream) in above
    ]
    try:
        yield
    finally:
        for name, stream in replaced.items():
            setattr(sys, name, stream)
        for handler, stream in moved:
            if stream is not None:
                handler.setStream(stream)
        for proxy in above.values():
            proxy.flush()


def _handlers() -> Iterator[logging.StreamHandler[Any]]:
    """Yield every handler of the standard library's loggers that writes to a stream."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for logger in loggers:
        for handler in logger.handlers if isinstance(logger, logging.Logger) else ():
            if isinstance(handler, logging.StreamHandler):
                yield handler
