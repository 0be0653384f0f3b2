"""Watch the event loop of a worker: one that does not run for too long is killed, and the place where it was is known.

The timeouts of a stage are timers of its event loop, so code that blocks the loop (one that never yields, a call that
waits for the kernel, C code that keeps the interpreter's lock) is bounded by none of them. The worker counts in a file
that it shares with its parent, which checks that the count grows while the parent itself runs, so that a machine that
was suspended kills no worker. For the place it sends a signal, which faulthandler answers without the lock.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import re
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio

GRACE_S = 10.0
"""Seconds that the loop may be late beyond the bound on its calls: a busy machine, or one that swaps."""

TICKS = 8
"""Times that a worker counts within its limit."""

CHECK_S = 1.0
"""Seconds between two checks of the parent."""

WHERE = signal.SIGRTMAX - 3
"""The signal that asks a worker where it is."""

ANSWER_TIMEOUT_S = 1.0

MOST_WRITTEN = 256 * 1024
"""Bytes: the stacks of a hundred threads."""

_COUNT = struct.Struct("=Qd")
"""The count, and the limit in seconds, which is 0 while the loop is not watched."""

_THREAD = re.compile(r"^(?:Current t|T)hread 0x.*$", re.MULTILINE)

_PLACE = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


class LoopWatch:
    """The worker's side: counts while its loop runs. `shared` is the file."""

    def __init__(self, shared: int) -> None:
        self._shared = shared
        self._count = 0
        self._bounds: list[float] = []
        """Of the stages that are watched: a fragment has several."""
        self._timer: asyncio.TimerHandle | None = None
        os.lseek(shared, _COUNT.size, os.SEEK_SET)
        faulthandler.register(WHERE, file=shared)

    @contextmanager
    def within(self, bound_s: float) -> Iterator[None]:
        """Let the parent kill this process when its loop does not run for `bound_s`, that of a call, and `GRACE_S`."""
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
        limit_s = max(self._bounds) + GRACE_S if self._bounds else 0.0
        os.pwrite(self._shared, _COUNT.pack(self._count, limit_s), 0)
        if limit_s:
            self._timer = asyncio.get_running_loop().call_later(limit_s / TICKS, self._tick)


async def loop_blocked(shared: int) -> float:
    """Wait until the loop of a worker has not run for longer than its limit, which is returned. The parent's side."""
    last, unchanged = b"", 0
    while True:
        await anyio.sleep(CHECK_S)
        counted = os.pread(shared, _COUNT.size, 0)
        unchanged = unchanged + 1 if counted == last else 0
        last = counted
        limit_s: float = _COUNT.unpack(counted)[1] if counted else 0.0
        if limit_s and unchanged * CHECK_S > limit_s:
            return limit_s


async def blocked_at(shared: int, ask: Callable[[int], object]) -> str:
    """Return where the main thread of a worker is, which `ask` sends a signal; "an unknown place" without an answer."""
    ask(WHERE)
    await _answered(shared)
    return place_in(os.pread(shared, MOST_WRITTEN, _COUNT.size).decode(errors="replace"))


async def _answered(shared: int) -> None:
    """Wait until the answer is complete, or for `ANSWER_TIMEOUT_S`."""
    size = _COUNT.size
    for _ in range(TICKS):
        await anyio.sleep(ANSWER_TIMEOUT_S / TICKS)
        before, size = size, os.fstat(shared).st_size
        if size == before > _COUNT.size:
            return


def place_in(written: str) -> str:
    r"""Return the place of the main thread, the last one, in what faulthandler has written.

    >>> place_in('Current thread 0x7f (most recent call first):\n  File "/env.py", line 12 in step\n')
    '/env.py:12 in step'
    """
    main = _THREAD.split(written)[-1]
    place = _PLACE.search(main)
    return f"{place[1]}:{place[2]} in {place[3]}" if place else "an unknown place"
