"""Report what a test that misses its deadline waits for: live pipelines and channels, and the position of every task.

pytest-timeout fails the test and shows where its threads are; in an event loop that waits, that is nowhere. This prints
the waits first, and has scripts that the test started print theirs. The hook is for a conftest to import.
"""

from __future__ import annotations

import asyncio
import gc
import linecache
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tests.processes.children import children_of

__all__ = ["pytest_timeout_set_timer", "tell_when_asked", "waits"]

TELLING_S = 60.0
"""Bound on the time in which scripts print what they wait for, for one that does not come to it."""

TELLING = ("Pipeline", "MemorySender", "MemoryReceiver", "RemoteSender", "RemoteReceiver")
"""Classes of penstock whose `statistics()` contain waits."""


def waits() -> str:
    """Return the waits of all pipelines, channels and tasks of this process."""
    return "\n".join(["what is waited for:", *_ends(), *_tasks()])


def _ends() -> Iterator[str]:
    for each in gc.get_objects():
        kind = type(each)
        if kind.__name__ in TELLING and kind.__module__.startswith("penstock."):
            yield f"  {each!r}\n    {each.statistics()}"


def _tasks() -> Iterator[str]:
    tasks = [each for each in gc.get_objects() if issubclass(type(each), asyncio.Task)]  # by type: some objects warn
    for task in [each for each in tasks if not each.done()]:
        yield f"  {task.get_name()}"
        yield from _awaited(task.get_coro())


def _awaited(awaitable: Any) -> Iterator[str]:
    """Return the position of a task, from its outermost coroutine to the innermost."""
    while awaitable is not None:
        for kind in ("cr", "ag", "gi"):
            if frame := getattr(awaitable, f"{kind}_frame", None):
                code = frame.f_code
                line = linecache.getline(code.co_filename, frame.f_lineno).strip()
                yield f"    {code.co_filename}:{frame.f_lineno} {code.co_name}: {line}"
                awaitable = getattr(awaitable, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
                break
        else:
            return


def tell_when_asked() -> None:
    """Have a script print its waits when the test misses its deadline, once: then it ignores the signal."""

    def tell(*_: object) -> None:
        sys.stderr.write(f"process {os.getpid()}, {waits()}\n")
        sys.stderr.flush()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    signal.signal(signal.SIGUSR1, tell)


def _ask_scripts() -> None:
    """Have the scripts below this process print their waits."""
    asked = [pid for pid in _below(os.getpid()) if _heeds_sigusr1(pid)]
    for pid in asked:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    bound = time.monotonic() + TELLING_S
    while any(_heeds_sigusr1(pid) for pid in asked) and time.monotonic() < bound:
        time.sleep(0.01)


def _below(pid: int) -> Iterator[int]:
    for child in children_of(pid):
        yield child
        yield from _below(child)


def _heeds_sigusr1(pid: int) -> bool:
    """Return whether a process has a handler; the signal kills one without, and one that has told ignores it."""
    with suppress(FileNotFoundError, ProcessLookupError):
        status = Path(f"/proc/{pid}/status").read_text()
        return bool(int(status.partition("SigCgt:\t")[2].split()[0], 16) >> signal.SIGUSR1 - 1 & 1)
    return False


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, object, object]:  # noqa: ARG001 (the names are given)
    """Print the waits before a test is failed for its time."""
    result = yield
    installed = signal.getsignal(signal.SIGALRM)
    if not callable(installed):
        return result
    fail: Callable[[int, FrameType | None], Any] = installed

    def tell_and_fail(number: int, frame: FrameType | None) -> None:
        sys.stderr.write(waits() + "\n")
        sys.stderr.flush()
        _ask_scripts()
        fail(number, frame)

    signal.signal(signal.SIGALRM, tell_and_fail)
    return result
