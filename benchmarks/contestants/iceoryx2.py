"""iceoryx2: publish-subscribe through lock-free shared memory, with a spinning subscriber or one that is notified."""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..records import Plain, as_bytes, trajectory_bytes
from .harness import IDLE_S, IN_FLIGHT, Case, Control, Outcome, Send, flat_parts, need, race, read_flat

__all__ = ["iceoryx2_event", "iceoryx2_spin"]

SERVICE = "bench"

SPINS = 20_000
"""Attempts after which a spinning subscriber yields None: some milliseconds."""


def iceoryx2_spin(case: Case) -> Outcome:
    """Receive with a spinning subscriber."""
    return race(case, partial(_serve, event=False), _connect)


def iceoryx2_event(case: Case) -> Outcome:
    """Notify after each record; the subscriber drains, then waits for the event."""
    return race(case, partial(_serve, event=True), _connect)


class _Address(NamedTuple):
    directory: str
    """Directory of its files; the last part is the prefix of those in /dev/shm."""
    producers: int
    nbytes: int
    """Size of the largest record."""
    event: bool
    ready: Any
    """Set when the subscriber knows all publishers; before, records beyond its buffer are dropped."""


@contextmanager
def _serve(case: Case, _control: Control, *, event: bool) -> Iterator[tuple[Any, Iterator[Plain | None]]]:
    iox2 = need("iceoryx2", "iceoryx2")
    nbytes = case.group * (trajectory_bytes(case.tokens) + case.tokens) + 4096
    with _directory() as directory:
        ready = multiprocessing.get_context("spawn").Event()
        address = _Address(directory, case.producers, nbytes, event, ready)
        node = _node(iox2, address)
        service = _service(iox2, node, address)
        subscriber = service.subscriber_builder().buffer_size(IN_FLIGHT).create()
        listener = _events(iox2, node).listener_builder().create() if event else None
        try:
            records = _taken_from(subscriber, _waiter(iox2, listener))
            yield address, itertools.chain(_met(service, subscriber, address), records)
        finally:
            subscriber.delete()
            if listener is not None:
                listener.delete()


@contextmanager
def _directory() -> Iterator[str]:
    """Make a directory, and remove it with the files that iceoryx2 leaves behind."""
    with tempfile.TemporaryDirectory(prefix="iceoryx2_") as directory:
        try:
            yield directory
        finally:
            for left in Path("/dev/shm").glob(f"{Path(directory).name}*"):  # noqa: S108 (where iceoryx2 puts them)
                left.unlink(missing_ok=True)


def _node(iox2: Any, address: _Address) -> Any:
    iox2.set_log_level(iox2.LogLevel.Error)
    config = iox2.config.default()
    config.global_cfg.root_path = iox2.Path.new(address.directory)
    config.global_cfg.prefix = iox2.FileName.new(Path(address.directory).name)
    return iox2.NodeBuilder.new().config(config).create(iox2.ServiceType.Ipc)


def _service(iox2: Any, node: Any, address: _Address) -> Any:
    builder = node.service_builder(iox2.ServiceName.new(SERVICE))
    return (
        builder.publish_subscribe(iox2.Slice[ctypes.c_uint8])
        .max_publishers(address.producers)
        .max_subscribers(1)
        .subscriber_max_buffer_size(IN_FLIGHT)
        .enable_safe_overflow(value=False)
        .open_or_create()
    )


def _events(iox2: Any, node: Any) -> Any:
    return node.service_builder(iox2.ServiceName.new(SERVICE)).event().open_or_create()


def _waiter(iox2: Any, listener: Any) -> Callable[[], bool]:
    """Return a function that waits for a notification, or spins; it returns whether none came for a while."""
    if listener is not None:
        duration = iox2.Duration.from_secs_f64(IDLE_S)
        return lambda: not listener.timed_wait(duration)
    attempts = itertools.count(1)
    return lambda: next(attempts) % SPINS == 0


def _met(service: Any, subscriber: Any, address: _Address) -> Iterator[None]:
    """Yield None until the subscriber knows all publishers, then let them begin."""
    while service.dynamic_config.number_of_publishers < address.producers:
        time.sleep(IDLE_S)
        yield None
    subscriber.has_samples()  # connects to new publishers
    address.ready.set()


def _taken_from(subscriber: Any, idle: Callable[[], bool]) -> Iterator[Plain | None]:
    while True:
        sample = subscriber.receive()
        if sample is not None:
            yield read_flat(_view(sample))
            sample.delete()
        elif idle():
            yield None


def _view(sample: Any, nbytes: int | None = None) -> memoryview:
    """Return the payload of a sample as plain bytes, unlike a memoryview of ctypes."""
    payload = sample.payload()
    count = payload.len() if nbytes is None else nbytes
    memory: Any = (ctypes.c_uint8 * count).from_address(payload.as_ptr())
    return as_bytes(np.frombuffer(memory, np.uint8))


@contextmanager
def _connect(address: _Address, _producer: int) -> Iterator[Send]:
    iox2 = need("iceoryx2", "iceoryx2")
    node = _node(iox2, address)
    publisher = (
        _service(iox2, node, address)
        .publisher_builder()
        .initial_max_slice_len(address.nbytes)
        .backpressure_strategy(iox2.BackpressureStrategy.RetryUntilDelivered)
        .create()
    )
    notifier = _events(iox2, node).notifier_builder().create() if address.event else None

    def send(record: Plain) -> None:
        parts, nbytes = flat_parts(record)
        sample = publisher.loan_slice_uninit(nbytes)
        view, end = _view(sample, nbytes), 0
        for part in parts:
            view[end : end + len(part)] = part
            end += len(part)
        sample.assume_init().send()
        if notifier is not None:
            notifier.notify()

    address.ready.wait()
    yield send
    publisher.delete()
    if notifier is not None:
        notifier.delete()
