"""Call a function in a thread, again and again: a check that goes on while the event loop is blocked."""

from __future__ import annotations

import threading
from collections.abc import Callable


class WatchThread:
    """Calls `check` every `interval_s` in a thread. It needs the interpreter's lock, so it waits for code in C too."""

    def __init__(self, name: str, interval_s: float, check: Callable[[], None]) -> None:
        self._interval_s = interval_s
        self._check = check
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread. Blocks until it runs."""
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            self._check()

    def close(self) -> None:
        """End the thread. Closing twice is fine."""
        self._closed.set()
