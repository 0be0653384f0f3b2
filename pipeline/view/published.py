"""The view of a run as a file in its folder, for `penstock top` in another process of the host."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path

import anyio
import msgspec

from ..accounting.telemetry import get_logger
from ..durability.resumption import is_running
from ..errors import NoView
from ..util.blocking import in_thread
from ..util.json_file import read_json, write_json
from ..util.repeated_errors import RepeatedErrors
from .snapshot import Snapshot, Watched, duration

FILE = "view.json"

EVERY_S = 1.0
"""Seconds between two writes."""

LATE_S = 5.0
"""The age of a late view: the event loop of the run is blocked, or its process is stopped."""

log = get_logger("penstock.view")


class ViewFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file."""

    written_s: float
    """The time of the host's monotonic clock, shared by all its processes."""
    shown: Snapshot


class PublishedView:
    """Replaces the file once a second, in a thread; see `Display`. After a write that fails the next is tried."""

    def __init__(self, watched: Watched, folder: Path) -> None:
        self._watched = watched
        self._path = folder / FILE
        self._errors = RepeatedErrors(log, "view_not_written")
        self._lock = threading.Lock()
        """Held while the file is written: a write is abandoned by its wait, and goes on."""
        self._taken = 0
        """Snapshots that were taken."""
        self._written = 0
        """The number of the snapshot that was written last: an older one must not replace it."""

    async def open(self) -> None:
        """Write the first view."""
        await self._publish()

    async def refresh(self) -> None:
        """Write until cancelled."""
        while True:
            await anyio.sleep(EVERY_S)
            await self._publish()

    async def close(self) -> None:
        """Write the last view, with the end of the run."""
        await self._publish()

    async def _publish(self) -> None:
        self._taken += 1
        await in_thread(self._write, self._watched.snapshot(), self._taken)

    def _write(self, shown: Snapshot, number: int) -> None:
        published = ViewFile(written_s=time.monotonic(), shown=self._watched.completed(shown))
        with self._lock:
            if number < self._written:
                return
            self._written = number
            try:
                write_json(self._path, published)
            except OSError as error:
                self._errors.record(error, path=str(self._path))


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A run as another process sees it."""

    running: bool
    published: ViewFile | None
    """None where a run has begun, and has not written its view yet."""

    @property
    def died(self) -> bool:
        """Return whether its process ended without ending the run."""
        return not self.running and self.published is not None and not self.published.shown.ended

    def state(self) -> str:
        """Return the state of the run as a sentence."""
        if self.published is None:
            return "starts"
        if self.running:
            age_s = time.monotonic() - self.published.written_s
            return f"runs, and wrote this {duration(age_s)} ago: is it stopped?" if age_s > LATE_S else "runs"
        if self.published.shown.ended:
            return f"ended: {self.published.shown.stop_reason}"
        return "died: its process is gone, and this is its last view; start it again to continue it"


def seen(folder: Path) -> Seen:
    """Return the run in `folder` as it is now. Opens files only to read; blocks.

    Raises:
        NoView: there is no run in `folder`, and there was none that wrote its view.
        FileDamaged: the view cannot be read.
    """
    running = False
    with suppress(FileNotFoundError, NotADirectoryError):
        running = is_running(folder)  # before the file is read, which a run that has ended has written before
    published = _read(folder / FILE)
    if running and published is not None and published.shown.ended:
        published = None  # that of an earlier run
    if not running and published is None:
        raise NoView(
            f"expected the folder of a run, with {FILE}, got {folder}: give the folder of Pipeline.run(folder=…), or "
            f"that of the configuration"
        )
    return Seen(running=running, published=published)


def _read(path: Path) -> ViewFile | None:
    with suppress(FileNotFoundError, NotADirectoryError):
        return read_json(path, ViewFile, remedy="remove the file, which a run writes again every second")
    return None
