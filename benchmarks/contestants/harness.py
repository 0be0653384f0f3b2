"""Shared parts of the contestants: spawned producers, the records and their timing, a consumer that packs and checks.

A contestant is a function from a `Case` to an `Outcome`, see `CONTESTANTS`. Peers are written as two context managers:
`serve` yields an address for the producers and an endless iterator of records (None after some 20 ms without any),
`connect` yields the `send` of a producer; `race` does the rest.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias

import msgspec
import numpy as np

from penstock import TrajectoryGroup
from penstock._pipeline.workers.worker import die_with

from ..records import COLUMNS, ROW, Checker, Packing, Plain, as_bytes, make_groups, plain

__all__ = [
    "DEADLINE_S",
    "GRACE_S",
    "IDLE_S",
    "IN_FLIGHT",
    "Absent",
    "Case",
    "Connect",
    "Control",
    "Latencies",
    "Meter",
    "Outcome",
    "Send",
    "Serve",
    "decode_header",
    "encode_header",
    "flat_parts",
    "groups_to_send",
    "leaving_nothing",
    "need",
    "producing",
    "race",
    "read_flat",
    "records_to_send",
]

WARM_UP_S = 0.5

IDLE_S = 0.02
"""Time after which an iterator of records yields None."""

IN_FLIGHT = 16
"""Groups that a producer may have in flight where a contestant has the option."""

DEADLINE_S = 60.0
"""Bound on a case, in addition to the measured time."""

GRACE_S = 5.0
"""Bound on the end of a producer, after which it is killed, and on the arrival of its last records."""


class Absent(Exception):
    """A contestant cannot run here; the message names the missing requirement."""


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """Exit on SIGTERM by an exception, like Ctrl-C, so that processes are ended and files removed."""
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def need(module: str, requirement: str) -> Any:
    """Return a module of a peer.

    Raises:
        Absent: it is not installed; the message is the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name is not None and module.startswith(error.name):
            raise Absent(f"pip install {requirement}") from None
        raise


@dataclass(frozen=True)
class Case:
    """One setting of the benchmark."""

    producers: int
    group: int
    """Trajectories of a group."""
    tokens: int
    """Tokens of a trajectory."""
    seconds: float
    """Measured time."""
    interval_s: float = 0.0
    """Seconds between two groups of one producer; 0 for full speed."""
    one_at_a_time: bool = False
    """True if a group is sent after the previous one was received."""

    def pinging(self) -> Case:
        """Return the case with one producer and one record in flight."""
        return replace(self, producers=1, interval_s=0.001, one_at_a_time=True, seconds=min(1.0, self.seconds))

    def paced(self, trajectories_per_s: float) -> Case:
        """Return the case with a total rate of so many trajectories a second."""
        return replace(self, interval_s=self.producers * self.group / trajectories_per_s)


@dataclass(frozen=True)
class Outcome:
    """The result of a case."""

    trajectories_per_s: float
    p50_us: float = float("nan")
    """Time from before `send` to the receipt of a group; only where groups are paced."""
    p99_us: float = float("nan")


class Control:
    """State that consumer and producers share besides the transport: the stop flag, and the number of sent groups."""

    def __init__(self, producers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._stop = context.RawValue(ctypes.c_byte, 0)
        self._sent = context.RawArray(ctypes.c_int64, [-1] * producers)
        self._taken = context.RawValue(ctypes.c_int64, 0)

    @property
    def stopping(self) -> bool:
        """Return whether producers must stop sending."""
        return bool(self._stop.value)

    def stop(self) -> None:
        """Make producers stop sending."""
        self._stop.value = 1

    @property
    def taken(self) -> int:
        """Return the number of groups that the consumer has received, where they are paced."""
        return self._taken.value

    def take(self, received: int) -> None:
        """Set the number of received groups."""
        self._taken.value = received

    def report(self, producer: int, sent: int) -> None:
        """Set the number of groups that a producer sent in all."""
        self._sent[producer] = sent

    @property
    def sent(self) -> dict[int, int]:
        """Return the number of groups of each producer; -1 until it has reported."""
        return dict(enumerate(self._sent))


class Latencies:
    """Latencies of groups, from their time stamps."""

    def __init__(self) -> None:
        self._us: list[float] = []

    def note(self, meta: dict[str, Any]) -> None:
        """Record the latency of a received group."""
        self._us.append((time.monotonic_ns() - meta["sent_ns"]) / 1000)

    def restart(self) -> None:
        """Discard the latencies so far."""
        self._us.clear()

    def percentiles(self) -> tuple[float, float]:
        """Return median and 99th percentile, in microseconds."""
        p50, p99 = np.percentile(self._us, [50, 99]) if self._us else (np.nan, np.nan)
        return float(p50), float(p99)


class Meter:
    """Measures the rate for the time of the case, after a warm-up that begins when every producer sends."""

    def __init__(self, case: Case, checker: Checker, control: Control, latencies: Latencies) -> None:
        self._case = case
        self._checker = checker
        self._control = control
        self._latencies = latencies
        self._warm_at: float | None = None
        self._begin: tuple[float, int] | None = None
        self._deadline = time.perf_counter() + case.seconds + DEADLINE_S
        self._rate: float | None = None

    def look(self, received: int) -> None:
        """Update the measurement; `received` groups have arrived so far.

        Raises:
            TimeoutError: the case takes longer than its bound.
        """
        now = time.perf_counter()
        if now > self._deadline:
            raise TimeoutError(
                f"expected an end within {DEADLINE_S:.0f} s after the measured time, got {received} groups"
            )
        if self._rate is not None:
            return
        if self._begin is not None:
            began, first = self._begin
            if now - began >= self._case.seconds:
                self._rate = (received - first) * self._case.group / (now - began)
                self._control.stop()
        elif self._warm_at is not None:
            if now >= self._warm_at:
                self._begin = (now, received)
                self._latencies.restart()
        elif self._checker.all_producers_send or (self._case.interval_s and received):
            self._warm_at = now + WARM_UP_S

    def outcome(self) -> Outcome:
        """Return the result.

        Raises:
            RuntimeError: the producers ended before the time was over.
        """
        if self._rate is None:
            raise RuntimeError("the producers ended before the time was over")
        return Outcome(self._rate, *self._latencies.percentiles())


# -- records of producers, and their timing ----------------------------------------------------------------------------


def groups_to_send(case: Case, producer: int, control: Control) -> Iterator[TrajectoryGroup]:
    """Yield the groups of a producer when they are due; paced groups have the time of sending in `meta`."""
    groups = make_groups(producer, group=case.group, tokens=case.tokens)
    replace_in = msgspec.structs.replace  # half a microsecond for each record
    for number in _numbers(case, producer, control):
        group = groups[number % len(groups)]
        if case.interval_s:
            group = replace_in(group, meta=group.meta | {"sent_ns": time.monotonic_ns()})
        yield replace_in(group, instance_id=str(number))


def records_to_send(case: Case, producer: int, control: Control) -> Iterator[Plain]:
    """Yield the same records in the form of peers."""
    records = [plain(group) for group in make_groups(producer, group=case.group, tokens=case.tokens)]
    for number in _numbers(case, producer, control):
        env, _, meta, rows, columns = records[number % len(records)]
        if case.interval_s:
            meta = meta | {"sent_ns": time.monotonic_ns()}
        yield Plain(env, str(number), meta, rows, columns)


def _numbers(case: Case, producer: int, control: Control) -> Iterator[int]:
    """Yield the number of each group when it is due (producers alternate evenly), until the consumer stops."""
    begin = time.perf_counter() + case.interval_s * producer / case.producers
    for number in itertools.count():
        if case.interval_s:
            _sleep_until(begin + number * case.interval_s)
        while case.one_at_a_time and control.taken < number and not control.stopping:
            time.sleep(case.interval_s / 2)
        if control.stopping:
            control.report(producer, number)
            return
        yield number


def _sleep_until(due: float) -> None:
    delay = due - time.perf_counter()
    if delay > 0:
        time.sleep(delay)


# -- a record as bytes, for peers that move bytes --------------------------------------------------------------------

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[str, str, dict[str, Any], bytes]).decode


def encode_header(record: Plain) -> bytes:
    """Encode all fields but the columns over tokens."""
    return _encode((record.env, record.instance_id, record.meta, record.rows.tobytes()))


def decode_header(header: Any, columns: Any) -> Plain:
    """Return the record of a header and its column buffers."""
    env, instance_id, meta, rows = _decode(header)
    return Plain(env, instance_id, meta, np.frombuffer(rows, ROW), columns)


def flat_parts(record: Plain) -> tuple[list[Any], int]:
    """Return the record as consecutive buffers, and their total size in bytes."""
    header = encode_header(record)
    parts = [len(header).to_bytes(4, "little"), header, *map(as_bytes, record.columns)]
    return parts, sum(map(len, parts))


def read_flat(view: memoryview) -> Plain:
    """Return the record of `flat_parts`, with columns that are views."""
    end = 4 + int.from_bytes(view[:4], "little")
    record = decode_header(view[4:end], ())
    tokens = int(record.rows["length"].sum())
    bounds = list(itertools.accumulate((tokens * dtype.itemsize for dtype in COLUMNS.values()), initial=end))
    return record._replace(columns=[view[first:last] for first, last in itertools.pairwise(bounds)])


# -- the race --------------------------------------------------------------------------------------------------------

Send: TypeAlias = Callable[[Plain], object]


Serve: TypeAlias = Callable[[Case, Control], AbstractContextManager[tuple[Any, Iterator[Plain | None]]]]
"""Opens the receiving end of a peer: an address, and the received records."""

Connect: TypeAlias = Callable[[Any, int], AbstractContextManager[Send]]
"""Opens a peer's sending end at an address, for a producer; its exit waits until no sent record can be lost."""


def race(case: Case, serve: Serve, connect: Connect | None) -> Outcome:
    """Run one case of a peer; without `connect`, `serve` makes its producers itself.

    Raises:
        Absent: the peer is not installed.
        WrongContents: the received records differ from those sent.
        TimeoutError: it took too long.
    """
    control = Control(case.producers)
    with serve(case, control) as (address, records):
        arguments = [(connect, address, case, number, control) for number in range(case.producers if connect else 0)]
        with producing(_produce, arguments) as processes:
            return _consume(case, records, control, processes)


def _produce(connect: Connect, address: Any, case: Case, producer: int, control: Control) -> None:
    with connect(address, producer) as send:
        for record in records_to_send(case, producer, control):
            send(record)


def _consume(case: Case, records: Iterator[Plain | None], control: Control, processes: list[BaseProcess]) -> Outcome:
    packing, latencies = Packing(case.group, case.tokens), Latencies()
    checker = Checker(producers=case.producers, group=case.group, tokens=case.tokens)
    meter, end = Meter(case, checker, control, latencies), _End(control, processes)
    received = 0
    for record in records:
        if record is None:
            meter.look(received)
            if end.reached(received):
                break
            continue
        if case.interval_s:
            latencies.note(record.meta)
        if not packing.fits(record):
            checker.check(packing.pack())
            meter.look(received)
        packing.add(record)
        received += 1
        if case.interval_s:
            control.take(received)
            meter.look(received)
    checker.check(packing.pack())
    checker.finish(control.sent)
    return meter.outcome()


class _End:
    """Detects the end of the records."""

    def __init__(self, control: Control, processes: list[BaseProcess]) -> None:
        self._control = control
        self._processes = processes
        self._deadline: float | None = None
        """Time until which missing records of ended producers may still arrive."""

    def reached(self, received: int) -> bool:
        """Return whether all records have arrived, or missing ones are lost; called after a while without records.

        Raises:
            RuntimeError: a producer failed.
        """
        for number, process in enumerate(self._processes):
            if process.exitcode:
                raise RuntimeError(f"producer {number} ended with exit code {process.exitcode}")
        sent = self._control.sent.values()
        if not self._control.stopping or min(sent) < 0:
            return False
        return received >= sum(sent) or (not any(p.is_alive() for p in self._processes) and self._timed_out())

    def _timed_out(self) -> bool:
        now = time.perf_counter()
        if self._deadline is None:
            self._deadline = now + GRACE_S
        return now >= self._deadline


@contextmanager
def producing(target: Callable[..., None], arguments: list[tuple[Any, ...]]) -> Iterator[list[BaseProcess]]:
    """Run `target` in a process for each tuple of arguments; the processes end with the body."""
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = [
        context.Process(target=_until_the_parent_dies, args=(os.getpid(), target, each), daemon=True)
        for each in arguments
    ]
    for process in processes:
        process.start()
    try:
        yield processes
        for process in processes:
            process.join(GRACE_S)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
                process.join(GRACE_S)
            if process.is_alive():
                process.kill()
            process.join()
            process.close()


def _until_the_parent_dies(parent: int, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Call `target`, and die with the parent: producers of peers would not notice its death, and some spin."""
    die_with(parent)
    target(*arguments)
