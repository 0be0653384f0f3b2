"""Handle SIGTERM, SIGINT and SIGHUP during a run: the first one stops it gracefully, a second ends the process at once.

Handlers are installed where a run is in the main thread of a script, for signals that the script does not handle
itself, and are restored when the last run has ended without a signal. One that the process was started to ignore, as by
nohup, stays ignored. `stoppable` extends this to the code that prepares a run and evaluates its result. From the first
signal on the process has `stop_timeout_s` to end. A thread enforces that: a stage may block the event loop, and a step
the interpreter's exit. Knows no stage.
"""

from __future__ import annotations

import _thread
import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import Any

import anyio

from ..errors import InvalidConfig, RunStopped
from ..util.exception_groups import all_of
from ..util.printing import leave_closed_terminal, print_line
from ..util.signals import REPEATED, STOP_SIGNALS, woken_by_signals

STOP_TIMEOUT_S = 30.0
"""Seconds from the first signal to the end of the process: as many as Kubernetes and torchrun allow before SIGKILL."""

STDERR = 2


class StopRequest:
    """The request that one run stops, by a signal."""

    def __init__(self, stop_timeout_s: float) -> None:
        self.stop_timeout_s = stop_timeout_s
        self.by: signal.Signals | None = None
        """The signal that was received; None until then."""
        self.ended = anyio.Event()
        """Set when the run has ended."""
        self.lent = False
        """True once the code that prepares a run has begun it."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._stop: Callable[[str], None] | None = None

    def call(self, stop: Callable[[str], None]) -> None:
        """Call `stop` with the name of the signal when one is received; at once, where one was already."""
        self._stop = stop
        if self.by is not None:
            stop(self.by.name)

    @contextmanager
    def lend(self) -> Iterator[None]:
        """Leave the request to the run in the body, with a call of its own."""
        self.lent, stop = True, self._stop
        try:
            yield
        finally:
            self._stop = stop

    def post(self, by: signal.Signals) -> None:
        """Record signal `by`, and have the event loop stop the run. For a signal handler."""
        self.by = by
        self._loop.call_soon_threadsafe(self._stop_now)

    def _stop_now(self) -> None:
        if self.by is not None and self._stop is not None and not self.ended.is_set():
            print_line(f"{self.by.name}: the run is stopping; a second signal ends it at once")
            self._stop(self.by.name)

    async def error(self) -> BaseException:
        """Return the exception that ends the script, once the other runs of this process have stopped too."""
        self.ended.set()
        for other in list(_handlers.requests):
            await other.ended.wait()
        assert self.by is not None  # noqa: S101 (called only after a signal)
        stopped = RunStopped(self.by)
        _exit_by(stopped)
        # asyncio ends its loop at once, with all other tasks, where a SystemExit leaves any task but the main one
        return stopped if self._task is _handlers.main_task else BaseExceptionGroup(str(stopped), [stopped])


class _Handlers:
    """The signal handlers of this process, while any run is on."""

    def __init__(self) -> None:
        self.requests: list[StopRequest] = []
        """One for each run."""
        self.main_task: object = None
        """The task of asyncio.run; None where it is not known."""
        self._by: signal.Signals | None = None
        self._replaced: dict[signal.Signals, Any] = {}

    def add(self, request: StopRequest) -> None:
        self.requests.append(request)  # first: a handler may be called as soon as it is installed
        if len(self.requests) == 1 and self._by is None:
            self._install()

    def remove(self, request: StopRequest) -> None:
        request.ended.set()
        if len(self.requests) == 1 and self._by is None:
            self._restore()
        self.requests.remove(request)  # last: until all are restored, one may be called

    def _install(self) -> None:
        for number in STOP_SIGNALS:
            handler = signal.getsignal(number)
            if _is_default(number, handler):
                self._replaced[number] = signal.signal(number, self._handle)
        self.main_task = _main_task(self._replaced.get(signal.SIGINT))

    def _restore(self) -> None:
        while self._replaced:
            number, handler = self._replaced.popitem()
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)

    def _handle(self, number: int, _: object) -> None:
        by = signal.Signals(number)
        leave_closed_terminal()
        if self._by is not None and by == REPEATED:
            return
        if self._by is not None:
            _end_process(by, f"{by.name}: ended at once")
        self._by = by
        limit_s = min(request.stop_timeout_s for request in self.requests)
        _thread.start_new_thread(_end_after, (limit_s, by))  # threading.Thread takes locks that may be held here
        for request in self.requests:
            request.post(by)


_handlers = _Handlers()

_within_run: ContextVar[bool] = ContextVar("penstock run", default=False)

_prepared: ContextVar[StopRequest | None] = ContextVar("penstock prepared run", default=None)
"""The request of the code that prepares a run, until the run begins."""


@asynccontextmanager
async def stoppable(stop_timeout_s: float = STOP_TIMEOUT_S) -> AsyncGenerator[None]:
    """Make the body part of the run that it prepares, awaits and evaluates: before and after it, a signal cancels it.

    Raises:
        RunStopped: a signal has stopped the run, or cancelled the body; alone, or in an exception group.
    """
    with stop_request(stop_timeout_s) as stop, anyio.CancelScope() as scope:
        stop.call(lambda _: scope.cancel())
        token = _prepared.set(stop)
        try:
            yield
        finally:
            _prepared.reset(token)
    if stop.by is not None:
        moment = "after its last step" if stop.lent else "before its first step"
        print_line(f"the run was stopped by {stop.by.name} {moment}")
        raise await stop.error()


@contextmanager
def stop_request(stop_timeout_s: float) -> Iterator[StopRequest]:
    """Make a signal a request to stop within the body; see the module for exceptions. A run in a run gets none."""
    if not stop_timeout_s > 0:
        raise InvalidConfig(f"stop_timeout_s: expected a positive number of seconds, got {stop_timeout_s}")
    if (prepared := _prepared.get()) is not None:
        with _taken(prepared):
            yield prepared
        return
    request = StopRequest(stop_timeout_s)
    if _within_run.get() or not _may_install():
        yield request
        return
    token = _within_run.set(True)
    with woken_by_signals():
        _handlers.add(request)
        try:
            yield request
        finally:
            _handlers.remove(request)
            _within_run.reset(token)


@contextmanager
def _taken(prepared: StopRequest) -> Iterator[None]:
    """Take a request for the run in the body; a run in that run gets none."""
    token = _prepared.set(None)
    try:
        with prepared.lend():
            yield
    finally:
        _prepared.reset(token)


def _may_install() -> bool:
    """Return whether this is the main thread of a script; in an interactive session the user handles signals."""
    return threading.current_thread() is threading.main_thread() and not hasattr(sys, "ps1")


def _is_default(number: signal.Signals, handler: object) -> bool:
    """Return whether `handler` is Python's own for this signal, or the one that asyncio.run installs."""
    is_pythons = number == signal.SIGINT and handler is signal.default_int_handler
    return handler is signal.SIG_DFL or is_pythons or _main_task(handler) is not None


def _main_task(handler: object) -> object:
    """Return the task that the SIGINT handler of asyncio.run cancels; None where `handler` is another."""
    if not isinstance(handler, partial) or getattr(handler.func, "__func__", None) is not _ON_SIGINT:
        return None
    return handler.keywords.get("main_task")


_ON_SIGINT = getattr(asyncio.Runner, "_on_sigint", None)


def _end_after(seconds: float, by: signal.Signals) -> None:
    """End this process if it still runs after `seconds`. Runs in a thread of its own."""
    time.sleep(seconds)
    unfinished = len([request for request in _handlers.requests if not request.ended.is_set()])
    cause = "the run has not stopped" if unfinished else "the script has not ended"
    _end_process(by, f"{by.name}: {cause} within stop_timeout_s={seconds:g}; ended at once, see the last checkpoint")


def _end_process(by: signal.Signals, message: str) -> None:
    with suppress(OSError):
        os.write(STDERR, f"penstock: {message}\n".encode())
    os._exit(128 + by)


def _exit_by(stopped: RunStopped) -> None:
    """Make the interpreter exit by `stopped`, without a traceback, also where task groups have wrapped it."""
    before = sys.excepthook

    def exit_or_print(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if all_of(error, RunStopped):
            raise stopped from None
        before(kind, error, traceback)

    sys.excepthook = exit_or_print
