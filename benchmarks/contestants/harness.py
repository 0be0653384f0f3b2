"""What contestants share: producers by spawn, what they send and when, a consumer that packs, checks and counts.

A contestant is a function from a `Case` to an `Outcome`, see `CONTESTANTS`. Peers are written as two context managers:
`serve` gives an address for the producers and an endless iterator of records (None whenever there is none for some
20 ms), `connect` gives a producer its `send`; `race` does the rest.
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
from penstock._pipeline.processes.worker import die_with

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
"""How long an iterator of records waits before it says that there is none."""

IN_FLIGHT = 16
"""Groups that a producer may have in flight where a contestant lets one choose."""

DEADLINE_S = 60.0
"""What a case may take beyond the time that is counted, before it is given up: nothing runs for ever."""

GRACE_S = 5.0
"""How long a producer may take to end before it is killed, and what it had sent to arrive when it has ended."""


class Absent(Exception):
    """A contestant cannot run here; the message says what would change that."""


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """Let SIGTERM unwind, as Ctrl-C does: processes are ended and files removed on the way out."""
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def need(module: str, requirement: str) -> Any:
    """A module of a peer.

    Raises:
        Absent: it is not installed; the message gives the command that installs it.
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
    """Trajectories a group."""
    tokens: int
    """Tokens a trajectory."""
    seconds: float
    """How long to count."""
    interval_s: float = 0.0
    """Seconds between two groups of one producer; 0 for as fast as they go."""
    one_at_a_time: bool = False
    """Whether a group waits until the one before it was received."""

    def pinging(self) -> Case:
        """The same records from one producer, one in flight at a time."""
        return replace(self, producers=1, interval_s=0.001, one_at_a_time=True, seconds=min(1.0, self.seconds))

    def paced(self, trajectories_per_s: float) -> Case:
        """The same producers, sending so many trajectories a second between them."""
        return replace(self, interval_s=self.producers * self.group / trajectories_per_s)


@dataclass(frozen=True)
class Outcome:
    """What came of a case."""

    trajectories_per_s: float
    p50_us: float = float("nan")
    """One way, from before `send` to the group in the receiver's hands; only where groups are paced."""
    p99_us: float = float("nan")


class Control:
    """What consumer and producers share besides the transport: the word to stop, and how much was sent."""

    def __init__(self, producers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._stop = context.RawValue(ctypes.c_byte, 0)
        self._sent = context.RawArray(ctypes.c_int64, [-1] * producers)
        self._taken = context.RawValue(ctypes.c_int64, 0)

    @property
    def stopping(self) -> bool:
        """Whether producers shall send no more."""
        return bool(self._stop.value)

    def stop(self) -> None:
        """Let producers send no more."""
        self._stop.value = 1

    @property
    def taken(self) -> int:
        """Groups that the consumer has received, where they are paced."""
        return self._taken.value

    def take(self, received: int) -> None:
        """Note how many groups were received."""
        self._taken.value = received

    def report(self, producer: int, sent: int) -> None:
        """Note how many groups a producer sent in all."""
        self._sent[producer] = sent

    @property
    def sent(self) -> dict[int, int]:
        """Groups that each producer sent; -1 until it has reported."""
        return dict(enumerate(self._sent))


class Latencies:
    """How long groups took, by the stamps that they carry."""

    def __init__(self) -> None:
        self._us: list[float] = []

    def note(self, meta: dict[str, Any]) -> None:
        """A group is in the receiver's hands."""
        self._us.append((time.monotonic_ns() - meta["sent_ns"]) / 1000)

    def restart(self) -> None:
        """Forget what was noted so far."""
        self._us.clear()

    def percentiles(self) -> tuple[float, float]:
        """Median and 99th, in microseconds."""
        p50, p99 = np.percentile(self._us, [50, 99]) if self._us else (np.nan, np.nan)
        return float(p50), float(p99)


class Meter:
    """When to count: after a warm-up from the moment that everybody sends, for as long as the case says."""

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
        """Look at the clock; `received` groups have come so far.

        Raises:
            TimeoutError: the case takes longer than it may.
        """
        now = time.perf_counter()
        if now > self._deadline:
            raise TimeoutError(
                f"given up {DEADLINE_S:.0f} s after the time that was to be counted, {received} groups in"
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
        elif self._checker.everybody_sends or (self._case.interval_s and received):
            self._warm_at = now + WARM_UP_S

    def outcome(self) -> Outcome:
        """What was measured.

        Raises:
            RuntimeError: the producers ended before the time was over.
        """
        if self._rate is None:
            raise RuntimeError("the producers ended before the time was over")
        return Outcome(self._rate, *self._latencies.percentiles())


# -- what producers send, and when -----------------------------------------------------------------------------------


def groups_to_send(case: Case, producer: int, control: Control) -> Iterator[TrajectoryGroup]:
    """What a producer sends, when it is time; paced groups carry the moment at which they set out."""
    groups = make_groups(producer, group=case.group, tokens=case.tokens)
    replace_in = msgspec.structs.replace  # half a microsecond: what a record's name costs whoever makes it
    for number in _numbers(case, producer, control):
        group = groups[number % len(groups)]
        if case.interval_s:
            group = replace_in(group, meta=group.meta | {"sent_ns": time.monotonic_ns()})
        yield replace_in(group, instance_id=str(number))


def records_to_send(case: Case, producer: int, control: Control) -> Iterator[Plain]:
    """The same as peers send it."""
    records = [plain(group) for group in make_groups(producer, group=case.group, tokens=case.tokens)]
    for number in _numbers(case, producer, control):
        env, _, meta, rows, columns = records[number % len(records)]
        if case.interval_s:
            meta = meta | {"sent_ns": time.monotonic_ns()}
        yield Plain(env, str(number), meta, rows, columns)


def _numbers(case: Case, producer: int, control: Control) -> Iterator[int]:
    """The number of each group when it is due (producers take turns, evenly), until the consumer says stop."""
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
    """All that is not a column over tokens."""
    return _encode((record.env, record.instance_id, record.meta, record.rows.tobytes()))


def decode_header(header: Any, columns: Any) -> Plain:
    """The record of a header and the buffers that came with it."""
    env, instance_id, meta, rows = _decode(header)
    return Plain(env, instance_id, meta, np.frombuffer(rows, ROW), columns)


def flat_parts(record: Plain) -> tuple[list[Any], int]:
    """The record as buffers that lie one behind the other, and their bytes in all."""
    header = encode_header(record)
    parts = [len(header).to_bytes(4, "little"), header, *map(as_bytes, record.columns)]
    return parts, sum(map(len, parts))


def read_flat(view: memoryview) -> Plain:
    """The record of `flat_parts`, its columns views."""
    end = 4 + int.from_bytes(view[:4], "little")
    record = decode_header(view[4:end], ())
    tokens = int(record.rows["length"].sum())
    bounds = list(itertools.accumulate((tokens * dtype.itemsize for dtype in COLUMNS.values()), initial=end))
    return record._replace(columns=[view[first:last] for first, last in itertools.pairwise(bounds)])


# -- the race --------------------------------------------------------------------------------------------------------

Send: TypeAlias = Callable[[Plain], object]


Serve: TypeAlias = Callable[[Case, Control], AbstractContextManager[tuple[Any, Iterator[Plain | None]]]]
"""Opens a peer's receiving end: an address, and the records that come."""

Connect: TypeAlias = Callable[[Any, int], AbstractContextManager[Send]]
"""Opens a peer's sending end at an address, for a producer; leaving waits until what was sent cannot be lost."""


def race(case: Case, serve: Serve, connect: Connect | None) -> Outcome:
    """Run one case of a peer; without `connect`, `serve` makes its producers itself.

    Raises:
        Absent: the peer is not installed.
        WrongContents: something else arrived than was sent.
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
    """When nothing more is to come."""

    def __init__(self, control: Control, processes: list[BaseProcess]) -> None:
        self._control = control
        self._processes = processes
        self._given_up_at: float | None = None
        """Until when what is missing may still be on its way from producers that have ended: machines are busy."""

    def reached(self, received: int) -> bool:
        """Whether everything is here, or what is missing must be lost, now that nothing came for a while.

        Raises:
            RuntimeError: a producer failed.
        """
        for number, process in enumerate(self._processes):
            if process.exitcode:
                raise RuntimeError(f"producer {number} ended with exit code {process.exitcode}")
        sent = self._control.sent.values()
        if not self._control.stopping or min(sent) < 0:
            return False
        return received >= sum(sent) or (not any(p.is_alive() for p in self._processes) and self._out_of_patience())

    def _out_of_patience(self) -> bool:
        now = time.perf_counter()
        if self._given_up_at is None:
            self._given_up_at = now + GRACE_S
        return now >= self._given_up_at


@contextmanager
def producing(target: Callable[..., None], arguments: list[tuple[Any, ...]]) -> Iterator[list[BaseProcess]]:
    """Run `target` in a process for each tuple of arguments; on leaving all of them have ended."""
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
    """Call `target`; a peer's producer would never notice that whoever measures it was killed, and some spin."""
    die_with(parent)
    target(*arguments)
