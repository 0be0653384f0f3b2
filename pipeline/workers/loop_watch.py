"""Watch event loops: one that does not run is named with the place where it is, and a worker's is ended at its limit.

The timeouts of a stage are timers of its event loop, so code that blocks the loop (one that never yields, a call that
waits for the kernel) is bounded by none of them. The loop counts, and a check outside it finds whether the count grows
while the check itself runs, so that a machine that was suspended ends no worker. There are two places for the check:

1. The parent of a process of this host, because code in C may keep the interpreter's lock. Both share a file with the
   count. For the place it sends a signal: faulthandler answers it without the lock.
2. A thread of the process itself, everywhere else: workers that join, actors of Ray, the process of the pipeline.
"""

from __future__ import annotations

import asyncio
import faulthandler
import math
import os
import re
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Self

import anyio

from ..accounting.telemetry import get_logger
from ..channels.heartbeat import DEFAULT_HEARTBEAT_TIMEOUT_S
from ..util.watch_thread import WatchThread

log = get_logger("penstock.pipeline")

GRACE_S = 10.0
"""Seconds that the loop may be late beyond the bound on its calls: a busy machine, or one that swaps."""

NAMED_S = DEFAULT_HEARTBEAT_TIMEOUT_S
"""Seconds without the loop until its place is named, where no bound ends the process before."""

TICKS = 8
"""Times that a loop counts within the time until it is named."""

CHECK_S = 1.0
"""Seconds between two checks."""

WHERE = signal.SIGRTMAX - 3
"""The signal that asks a worker where it is."""

ANSWER_TIMEOUT_S = 10.0
"""Seconds that a worker may take to answer: it may share its processor with many others."""

ANSWER_POLL_S = 0.125

QUIET_POLLS = 8
"""Polls without a further byte that show a complete answer: faulthandler writes it line by line."""

MOST_WRITTEN = 256 * 1024
"""Bytes: the stacks of a hundred threads."""

OVER = "did not run its event loop for {:g} s, it was at {}"
"""The predicate of a worker that is ended."""

UNKNOWN_PLACE = "an unknown place"

_COUNT = struct.Struct("=Qd")
"""The count, and the limit in seconds: 0 while the loop is not watched."""

PHASE_BYTES = 256
"""Bytes of the text behind the count: the phase of a process that starts."""

_HEAD_BYTES = _COUNT.size + PHASE_BYTES
"""Bytes before an answer."""

_THREAD = re.compile(r"^(?:Current t|T)hread 0x.*$", re.MULTILINE)

_PLACE = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


# -- the loop's side -----------------------------------------------------------------------------------------------


class LoopWatch:
    """Counts while the loop runs, within its `with` statement; `count` is called with the count and the limit."""

    def __init__(self, count: Callable[[int, float], None]) -> None:
        self._report = count
        self._count = 0
        self._bounds: list[float] = []
        """Of the stages that have one: a fragment has several."""
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._tick()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._report(self._count, 0.0)

    @contextmanager
    def within(self, bound_s: float) -> Iterator[None]:
        """Limit the time without the loop to `bound_s`, the bound of a stage on its calls, and `GRACE_S`."""
        self._bounds.append(bound_s)
        self._tick()
        try:
            yield
        finally:
            self._bounds.remove(bound_s)
            self._tick()

    def _tick(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._count += 1
        limit_s = max(self._bounds) + GRACE_S if self._bounds else math.inf
        self._report(self._count, limit_s)
        self._timer = asyncio.get_running_loop().call_later(min(limit_s, NAMED_S) / TICKS, self._tick)


# -- the check -----------------------------------------------------------------------------------------------------


class LoopCheck:
    """Finds at each check, `CHECK_S` after the one before, whether a loop runs."""

    def __init__(self, *, ends: bool) -> None:
        """Prepare; `ends` says whether the process is ended at its limit, or named only."""
        self._ends = ends
        self._last = -1
        self._unchanged = 0
        self._named = False

    @property
    def blocked_s(self) -> float:
        """Return the seconds without the loop, as of the last check."""
        return self._unchanged * CHECK_S

    def found(self, count: int, limit_s: float) -> Literal["runs", "blocked", "over"]:
        """Return the verdict on the count: `blocked` once for each wait, to name it; `over` where it must end."""
        if count != self._last or not limit_s:
            self._last, self._unchanged, self._named = count, 0, False
            return "runs"
        self._unchanged += 1
        if self._ends and self.blocked_s > limit_s:
            return "over"
        if self._named or self.blocked_s <= min(limit_s, NAMED_S):
            return "runs"
        self._named = True
        return "blocked"


# -- in the parent -------------------------------------------------------------------------------------------------


def note_phase(shared: int, phase: str) -> None:
    """Write the phase of a process that starts into the file that it shares with its parent."""
    os.pwrite(shared, phase.encode()[:PHASE_BYTES].ljust(PHASE_BYTES, b"\0"), _COUNT.size)


def phase_in(shared: int) -> str:
    """Return the phase that was noted; empty without one."""
    return os.pread(shared, PHASE_BYTES, _COUNT.size).rstrip(b"\0").decode(errors="replace")


def counted_in(shared: int) -> LoopWatch:
    """Return the watch of a process whose parent checks the file `shared`."""
    os.lseek(shared, _HEAD_BYTES, os.SEEK_SET)
    faulthandler.register(WHERE, file=shared)
    return LoopWatch(lambda count, limit_s: _write(shared, count, limit_s))


def _write(shared: int, count: int, limit_s: float) -> None:
    os.pwrite(shared, _COUNT.pack(count, limit_s), 0)


async def loop_over_limit(shared: int, worker: str, ask: Callable[[int], object]) -> str:
    """Wait until the loop of a worker has not run for longer than its limit, and name it where it is blocked before.

    Args:
        shared: the file with its count.
        worker: its name.
        ask: sends it a signal.

    Returns:
        The reason to end it.
    """
    check = LoopCheck(ends=True)
    while True:
        await anyio.sleep(CHECK_S)
        counted = os.pread(shared, _COUNT.size, 0)
        count, limit_s = _COUNT.unpack(counted) if len(counted) == _COUNT.size else (0, 0.0)
        match check.found(count, limit_s):
            case "over":
                return OVER.format(limit_s, await blocked_at(shared, ask))
            case "blocked":
                _name(worker, check.blocked_s, await blocked_at(shared, ask))


def _name(worker: str, blocked_s: float, place: str) -> None:
    log.warning("event_loop_blocked", worker=worker, blocked_s=blocked_s, at=place)


async def blocked_at(shared: int, ask: Callable[[int], object]) -> str:
    """Return the place of a worker's main thread, asked by a signal; "an unknown place" without an answer."""
    os.ftruncate(shared, _HEAD_BYTES)  # an earlier answer
    os.lseek(shared, _HEAD_BYTES, os.SEEK_SET)  # for both: the worker has inherited the descriptor
    ask(WHERE)
    await _answered(shared)
    return place_in(os.pread(shared, MOST_WRITTEN, _HEAD_BYTES).decode(errors="replace"))


async def _answered(shared: int) -> None:
    """Wait until the answer is complete, or for `ANSWER_TIMEOUT_S`."""
    size, quiet = _HEAD_BYTES, 0
    for _ in range(int(ANSWER_TIMEOUT_S / ANSWER_POLL_S)):
        await anyio.sleep(ANSWER_POLL_S)
        before, size = size, os.fstat(shared).st_size
        quiet = quiet + 1 if size == before > _HEAD_BYTES else 0
        if quiet == QUIET_POLLS:
            return


def place_in(written: str) -> str:
    r"""Return the place of the main thread, the last one, in the output of faulthandler.

    >>> place_in('Current thread 0x7f (most recent call first):\n  File "/env.py", line 12 in step\n')
    '/env.py:12 in step'
    """
    main = _THREAD.split(written)[-1]
    place = _PLACE.search(main)
    return f"{place[1]}:{place[2]} in {place[3]}" if place else UNKNOWN_PLACE


# -- in a thread of the process ------------------------------------------------------------------------------------


@contextmanager
def checked_in_thread(worker: str, end: Callable[[str], None] | None = None) -> Iterator[LoopWatch]:
    """Check the running loop in a thread within the body.

    Args:
        worker: the name of this process, for the warning.
        end: called in the thread, with the reason, when the loop has not run for longer than its limit; ends this
            process. Where it is None, the loop is named only.
    """
    checking = _Checking(worker, end)
    thread = WatchThread("penstock loop watch", CHECK_S, checking.check)
    thread.start()
    try:
        with LoopWatch(checking.count) as watch:
            yield watch
    finally:
        thread.close()


class _Checking:
    """The checks, in a thread, of the loop in the thread that makes this."""

    def __init__(self, worker: str, end: Callable[[str], None] | None) -> None:
        self._worker = worker
        self._end = end
        self._check = LoopCheck(ends=end is not None)
        self._counted = (0, 0.0)
        """The count and the limit: one value, replaced by the loop's thread."""
        self._thread = threading.get_ident()

    def count(self, count: int, limit_s: float) -> None:
        self._counted = (count, limit_s)

    def check(self) -> None:
        count, limit_s = self._counted
        found = self._check.found(count, limit_s)
        if found == "over" and self._end is not None:
            self._end(OVER.format(limit_s, self._place))
        elif found == "blocked":
            # In a thread of its own: the loop may be blocked in a handler of the log, which has its lock.
            named: Any = (self._worker, self._check.blocked_s, self._place)
            threading.Thread(target=_name, args=named, name="penstock loop warning", daemon=True).start()

    @property
    def _place(self) -> str:
        """The place of the loop's thread now."""
        frame = sys._current_frames().get(self._thread)  # noqa: SLF001 (documented: for debuggers of deadlocks)
        return (
            UNKNOWN_PLACE if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        )
