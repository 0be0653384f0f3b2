"""Run a stage in a worker process; the child's side.

A worker is started by `subprocess.Popen`, never by a fork. It inherits three descriptors: the payload (an anonymous
file with the pickled stage, written by its parent), the page of its ledger's counters, and a pipe for events to the
parent. The kernel kills it when its parent dies. It ends on SIGTERM, and leaves Ctrl-C to its parent. Its messages are
never pickled.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from multiprocessing import spawn
from types import TracebackType
from typing import Any

import anyio
import msgspec

from ..._schemas import TrajectoryGroup, TrajectoryId
from ..accounting.ledger import Ledger
from ..accounting.repetition_sets import iter_bits, masks_by_group
from ..accounting.shared_counters import EndState, SharedCounters
from ..accounting.telemetry import Metrics, report_waits
from ..channels.remote_sender import RemoteSender
from ..channels.transports import connect, serve
from ..errors import StageFailed
from ..graph.context import Context, entered
from ..graph.edge import CountingSendChannel, EdgeCounter
from ..util.exception_groups import consists_of, single_exception
from .worker_messages import (
    RECORDS,
    Connected,
    Ending,
    Failed,
    Finished,
    Serving,
    Starting,
    WorkerConfig,
    WorkerEvent,
    WorkerReport,
    encode_event,
)
from .worker_payload import open_payload

LONGEST_TRACEBACK = 32_000
"""Characters: the events of a worker fit its pipe, so that sending one never blocks."""

REPORT_INTERVAL_S = 0.1
"""Least seconds between two reports, which are sent with a record, after a failed rollout and, in a middle stage,
after any end: the parent may be waiting for those trajectories."""

PR_SET_PDEATHSIG = 1


class _ReportingLedger(Ledger):
    """The ledger of a middle stage's worker: collects ends for its parent, whose ledger holds the trajectories."""

    def __init__(self) -> None:
        super().__init__(admits_on_end=True)
        self.endings: list[Ending] = []
        """Ends that were not yet reported to the parent."""

    def end(self, what: TrajectoryGroup | Iterable[TrajectoryId], state: EndState, reason: str = "") -> None:
        """Count the end of trajectories, and add it to the next report."""
        kept = what if isinstance(what, TrajectoryGroup) else list(what)
        for group, mask in masks_by_group(kept):
            self.endings.append(Ending(group, list(iter_bits(mask)), state, reason))
        super().end(kept, state, reason)  # it never raises, for it admits what it does not know; its listeners report


# -- beginning and end ---------------------------------------------------------------------------------------------

_importing_main = False


def refuse_while_importing_main() -> None:
    """Refuse to run a pipeline while a worker imports its parent's script, which would start the run again.

    Raises:
        RuntimeError: the script is being imported.
    """
    if _importing_main:
        raise RuntimeError(
            "a worker imported the script that started it, and the script ran a pipeline: "
            "expected the run to be under `if __name__ == '__main__':`"
        )


def main(encoded: str) -> None:
    """Run a stage by its `WorkerConfig`, encoded as JSON."""
    config = msgspec.json.decode(encoded, type=WorkerConfig)
    die_with(config.parent)
    signal.signal(signal.SIGINT, lambda *_: None)  # a handler, because programs that it starts would inherit SIG_IGN
    for fd in (config.payload, config.counters, config.events):
        os.set_inheritable(fd, False)
    try:
        stopped = anyio.run(_run, _load(config), config)
    except BaseException as error:
        cause = single_exception(error)
        _report(config, Failed(_description(cause), _traceback(cause)))
        if not isinstance(cause, Exception):
            raise
        sys.exit(1)
    if stopped:
        _end_by_sigterm()
    _report(config, Finished())


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; exit where that has ended already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _end_by_sigterm() -> None:
    """End this process by SIGTERM, which its sender expects as the exit status, after everything was closed."""
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def _load(config: WorkerConfig) -> Any:
    """Prepare this interpreter by the first pickle of the payload, and return the stage, which is the second."""
    global _importing_main  # noqa: PLW0603 (read by a pipeline that the script runs on import)
    file = open_payload(config.payload)
    preparation = pickle.load(file)  # noqa: S301 (inherited from the parent that started this process)
    script = preparation.get("init_main_from_name") or preparation.get("init_main_from_path")
    if script:
        _report(config, Starting(f"importing {script}"))
    _importing_main = True
    spawn.prepare(preparation)
    _importing_main = False
    _report(config, Starting(f"unpickling {config.stage} and importing what it needs"))
    return pickle.load(file)  # noqa: S301 (as above)


def _description(error: BaseException) -> str:
    """Return a description of `error`, as the end of a sentence that begins with the worker's name."""
    if isinstance(error, StageFailed):  # within a fragment
        return f"failed: {error}"
    return "raised " + "".join(traceback.format_exception_only(error)).strip()


def _traceback(error: BaseException) -> str:
    """Return the traceback without the frames before the stage's."""
    error.__traceback__ = _from_the_stage_on(error.__traceback__)
    text = "".join(traceback.format_exception(error))
    return text if len(text) <= LONGEST_TRACEBACK else "…" + text[-LONGEST_TRACEBACK:]


def _from_the_stage_on(frames: TracebackType | None) -> TracebackType | None:
    start, frame = frames, frames
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == __file__ and frame.tb_next is not None:
            start = frame.tb_next
        frame = frame.tb_next
    return start


def _report(config: WorkerConfig, event: WorkerEvent) -> None:
    with suppress(BrokenPipeError):
        os.write(config.events, encode_event(event))


# -- running the stage ---------------------------------------------------------------------------------------------


async def _run(stage: Any, config: WorkerConfig) -> bool:
    """Run `stage` until it returns or SIGTERM arrives; return whether it was SIGTERM."""
    with mmap.mmap(config.counters, mmap.PAGESIZE) as page, anyio.CancelScope() as scope, _cancelled_by_sigterm(scope):
        counters = SharedCounters(page)
        ledger = _ReportingLedger() if config.channels.inbox_kind else Ledger(counters)
        context = Context(ledger, Metrics(), config.worker)
        try:
            with entered(context):
                await _run_connected(stage, config, context, counters)
        finally:
            counters.close()
    return scope.cancel_called


class _cancelled_by_sigterm:  # noqa: N801 (used like a function)
    """Cancels `scope` on SIGTERM within the body."""

    def __init__(self, scope: anyio.CancelScope) -> None:
        self._scope = scope

    def __enter__(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._scope.cancel)

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)


async def _run_connected(stage: Any, config: WorkerConfig, context: Context, counters: SharedCounters) -> None:
    _report(config, Starting(f"connecting to {config.channels.outbox_url}"))
    async with connect(
        config.channels.outbox_url, RECORDS[config.channels.outbox_kind], name=config.name, heartbeat_timeout_s=None
    ) as sender:
        _report(config, Connected())
        sender.on_ended(context.ledger.settle)
        context.ledger.step = max(context.ledger.step, counters.step)  # from now on it is notified of each step
        report = _ReportSender(sender, context)
        context.metrics.send_evaluation = report.flush
        admits_to = None if config.channels.inbox_kind else context.ledger
        outbox = CountingSendChannel(sender.clone(), EdgeCounter(admits_to, on_sent=report.flush_if_due))
        try:
            ledger = context.ledger
            ends = ledger.on_end if config.channels.inbox_kind else ledger.on_failure
            with ends(report.flush_soon):
                await _run_stage(stage, config, context, outbox)
        except Exception as error:
            if not consists_of(error, sender.failure):
                raise
            # The stage after this one has ended and closed the channel: this one is done too.
        finally:
            report.close()
            await outbox.close_all()


async def _run_stage(stage: Any, config: WorkerConfig, context: Context, outbox: CountingSendChannel[Any]) -> None:
    if config.channels.inbox_kind:
        async with _served(config) as inbox:
            with report_waits(context.metrics, config.stage, lambda: _waited(outbox, inbox)):
                await stage.run(inbox, outbox)
    else:
        with report_waits(context.metrics, config.stage, lambda: _waited(outbox)):
            await stage.run(outbox)


def _waited(outbox: CountingSendChannel[Any], inbox: Any = None) -> tuple[float, float]:
    return inbox.statistics().waited_s if inbox else 0.0, outbox.waits[1]


@asynccontextmanager
async def _served(config: WorkerConfig) -> AsyncIterator[Any]:
    async with serve(
        "shm://",
        RECORDS[config.channels.inbox_kind],
        capacity=config.channels.inbox_capacity,
        capacity_bytes=config.channels.inbox_capacity_bytes,
        max_senders=1,
        name=config.name,
        heartbeat_timeout_s=None,
    ) as inbox:
        _report(config, Serving(inbox.url))
        yield inbox


class _ReportSender:
    """Sends reports of the stage's observations, and of the trajectories that ended in it."""

    def __init__(self, sender: RemoteSender[Any], context: Context) -> None:
        self._sender = sender
        self._context = context
        self._last = 0.0
        self._later: asyncio.TimerHandle | None = None
        """The report that will be sent when it is due."""
        self._reasons: dict[str, dict[str, int]] = {}
        """The reasons of the last report."""

    def flush_if_due(self) -> None:
        """Send a report, unless one was sent within `REPORT_INTERVAL_S`."""
        if self._due_in_s <= 0:
            self._last = time.monotonic()
            self.flush()

    def flush_soon(self) -> None:
        """Send a report when one is due: no record may follow."""
        if self._later is None:
            self._later = asyncio.get_running_loop().call_later(max(0.0, self._due_in_s), self._flush_later)

    def _flush_later(self) -> None:
        self._later, self._last = None, time.monotonic()
        self.flush()

    @property
    def _due_in_s(self) -> float:
        return self._last + REPORT_INTERVAL_S - time.monotonic()

    def close(self) -> None:
        """Send the last report."""
        if self._later is not None:
            self._later.cancel()
        self.flush()

    def flush(self) -> None:
        """Send a report of everything since the last one, if there is anything."""
        metrics, ledger = self._context.metrics, self._context.ledger
        endings: list[Ending] = []
        reasons: dict[str, dict[str, int]] = {}
        if isinstance(ledger, _ReportingLedger):
            endings, ledger.endings = ledger.endings, []
        else:
            reasons = ledger.balance().reasons
        observations = metrics.take() if metrics else None
        if observations is not None or endings or reasons != self._reasons:
            self._reasons = reasons
            self._sender.send_telemetry(msgspec.msgpack.encode(WorkerReport(observations, endings, reasons)))
