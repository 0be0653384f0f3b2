"""Ranks: the processes of a torchrun that train one model together, as a trainer sees them.

Rank 0 leads: it sends commands (`command`), and all ranks execute them together. Commands have a process group of their
own. Between commands, while the leader waits for a batch, it sends pings in their place, so that a rank that is lost is
noticed then too: by the other end's closed connection, or after the timeout of the default group where no packet comes.
Every rank sends heartbeats to the store of the process group, so that the others can name the rank that failed. A rank
of a torchrun that is killed is killed by the kernel. No received data is unpickled. Knows no channel and no model.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import anyio
import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..._pipeline.errors import PeerLost
from ..._pipeline.workers.worker import die_with
from ..._schemas.conversion import convert
from ..losses.metrics import EffectiveSamples, Extreme, Mean, Metric, TokensUsed, merge

R = TypeVar("R")

HEARTBEAT_S = 0.25
"""Interval of the heartbeats of a rank, and of the pings of the leader."""

HEARTBEAT_TIMEOUT_S = 3.0
"""A rank without a heartbeat for this time after a connection broke is lost."""

PING = -1
"""The command to do nothing."""

METRICS: dict[str, Any] = {each.__name__: each for each in (EffectiveSamples, Extreme, Mean, TokensUsed)}


class Ranks:
    """This process among those of the default process group."""

    def __init__(self) -> None:
        if dist.is_torchelastic_launched():
            die_with(os.getppid())
        self.index: int = dist.get_rank()
        self.count: int = dist.get_world_size()
        world: Any = dist.group.WORLD
        self._work: Any = world if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        """Group for tensors on the host."""
        self._timeout: timedelta = self._work._get_backend(torch.device("cpu")).options._timeout  # noqa: SLF001
        """Bound on the time until another rank receives a command, or its absence is noticed."""
        self._commands: Any = dist.new_group(backend="gloo", timeout=self._timeout)
        """Group for commands. One of its own, because its operations are in another thread than collective ones."""
        self._heartbeat = _Heartbeat(self.index, self.count)
        self._pings = _Pings(self)
        if self.index == 0:
            self._pings.start()

    def __repr__(self) -> str:
        return f"<Ranks: {self.index} of {self.count}>"

    # -- commands of the leader ----------------------------------------------------------------------------------------

    @contextmanager
    def command(self, number: int, payloads: Sequence[bytes] = ()) -> Iterator[None]:
        """Send a command from the leader to all other ranks, and execute it in the body; no ping is sent meanwhile.

        Args:
            number: the command, at least 0.
            payloads: one for each other rank, if there are any.
        """
        with self.connected(), self._pings.lock:
            try:
                self.send(number, payloads)
                yield
            except RuntimeError:
                self._pings.stopped.set()  # a lost rank would keep a ping, and the lock, for the timeout
                raise

    def end(self, number: int) -> None:
        """Send the last command: the others stop listening after it."""
        with self._pings.lock:
            self._pings.stopped.set()
            self.send(number)

    def fail(self, number: int, message: str) -> None:
        """Send the last command, with a message, to the ranks that are not lost; do not wait for those that are."""
        with self._pings.lock:
            self._pings.stopped.set()
            posted: list[Any] = []
            for rank in range(1, self.count):
                with suppress(RuntimeError):
                    posted += self._post(rank, number, message.encode())
            for each in posted:
                with suppress(RuntimeError):
                    each.wait(timedelta(seconds=HEARTBEAT_TIMEOUT_S))

    async def watch(self) -> None:
        """Wait on the leader until another rank is lost between two commands, and raise that."""
        await anyio.wait_readable(self._pings.failed_fd)
        raise self._pings.failure

    def send(self, number: int, payloads: Sequence[bytes] = ()) -> None:
        """Send a command, while no other thread does."""
        each_its_own = payloads or [b""] * (self.count - 1)
        for each in [work for rank, own in enumerate(each_its_own, start=1) for work in self._post(rank, number, own)]:
            each.wait(self._timeout)

    def _post(self, rank: int, number: int, payload: bytes) -> list[Any]:
        """Begin to send a command to `rank`; return the work to wait for."""
        tensors = (torch.tensor([number, len(payload)]), _bytes_of(payload))
        return [dist.isend(tensor, rank, group=self._commands) for tensor in tensors if len(tensor)]

    def receive_command(self) -> tuple[int, bytes]:
        """Wait for the next command of the leader, on another rank; return it with its payload."""
        with self.connected():
            header = torch.tensor([PING, 0])
            while header[0] == PING:
                dist.recv(header, 0, group=self._commands)
            command, length = header.tolist()
            payload = torch.empty(length, dtype=torch.uint8)
            if length:
                dist.recv(payload, 0, group=self._commands)
            return command, payload.numpy().tobytes()

    # -- collective operations -----------------------------------------------------------------------------------------

    def maximum(self, number: int) -> int:
        """Return the largest `number` of any rank."""
        numbers = torch.tensor([number])
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._work)
        return int(numbers)

    def padded(self, parts: Sequence[R]) -> list[R | None]:
        """Return `parts`, with None at the end until every rank has as many."""
        return [*parts, *[None] * (self.maximum(len(parts)) - len(parts))]

    def merged(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Return the metrics of all ranks, merged; the same on every one.

        Raises:
            TypeError: a metric is of an unknown class.
        """
        mine = _encode_metrics({name: (_kind(metric), metric) for name, metric in metrics.items()})
        merged: dict[str, Metric] = {}
        for encoded in self.gathered(mine):
            merge(merged, {name: _metric(*each) for name, each in _decode_metrics(encoded).items()})
        return merged

    def gathered(self, mine: bytes) -> list[bytes]:
        """Return the bytes of each rank, in their order; the same on every one."""
        padded = torch.zeros(self.maximum(len(mine)), dtype=torch.uint8)
        padded[: len(mine)] = _bytes_of(mine)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        dist.all_gather(lengths, torch.tensor([len(mine)]), group=self._work)
        every = [torch.empty_like(padded) for _ in range(self.count)]
        dist.all_gather(every, padded, group=self._work)
        return [of_rank[: int(length)].numpy().tobytes() for length, of_rank in zip(lengths, every, strict=True)]

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Name the lost rank if a connection breaks within the body.

        Raises:
            PeerLost: a rank is lost; the message names it.
        """
        try:
            yield
        except RuntimeError as error:
            if lost := self._heartbeat.lost_ranks():
                names = " and ".join(f"rank {rank}" for rank in lost)
                raise PeerLost(f"{names} of {self.count} died, or hangs: the others cannot continue") from error
            raise

    def close(self) -> None:
        """Stop the heartbeats, and on the leader the pings."""
        self._pings.close()
        self._heartbeat.stop()


class _Pings:
    """Sends pings of the leader whenever no command is executed."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.lock = threading.Lock()
        """Held by the thread that sends, and while a command is executed."""
        self.stopped = threading.Event()
        """Set, under the lock, before the last command."""
        self.failure: Exception = RuntimeError("no rank was lost")
        """The reason why a ping could not be sent."""
        self.failed_fd = os.eventfd(0)
        """Readable once `failure` is set: an event loop waits for it."""
        self._thread = threading.Thread(target=self._run, name="penstock pings", daemon=True)

    def start(self) -> None:
        """Begin, on the leader."""
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self.stopped.wait(HEARTBEAT_S):
                with self._ranks.connected(), self.lock:
                    if not self.stopped.is_set():
                        self._ranks.send(PING)
        except Exception as error:  # noqa: BLE001 (`watch` raises it)
            self.failure = error
            os.eventfd_write(self.failed_fd, 1)

    def close(self) -> None:
        """Stop, and wait for the thread."""
        self.stopped.set()
        if self._thread.is_alive():
            self._thread.join(HEARTBEAT_TIMEOUT_S)
        if not self._thread.is_alive():
            os.close(self.failed_fd)


class _Heartbeat:
    """Sends the heartbeats of this rank, and checks those of the others.

    Its thread alone uses the store: a call blocks while the host of the store does not respond.
    """

    def __init__(self, rank: int, count: int) -> None:
        self._rank = rank
        self._count = count
        self._store: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001 (the store of the process group)
        self._checks: list[list[list[int]]] = []
        """For each check in progress, the counts of all ranks' heartbeats, read again and again."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="penstock rank", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        try:
            while not self._stopped.wait(HEARTBEAT_S):
                self._store.add(_beats_of(self._rank), 1)
                for counts in tuple(self._checks):
                    counts.append([self._store.add(_beats_of(rank), 0) for rank in range(self._count)])
        except RuntimeError:
            """The store ended with its process; `lost_ranks` reports that."""

    def lost_ranks(self) -> list[int]:
        """Return the ranks without a heartbeat for `HEARTBEAT_TIMEOUT_S`; rank 0 if its host's store is lost."""
        counts: list[list[int]] = []
        self._checks.append(counts)
        lost = set(range(self._count)) - {self._rank}
        deadline = time.monotonic() + HEARTBEAT_TIMEOUT_S
        while lost and time.monotonic() < deadline:
            time.sleep(HEARTBEAT_S)
            lost = {rank for rank in lost if not counts or counts[-1][rank] == counts[0][rank]}
        self._checks.remove(counts)
        return sorted(lost) if len(counts) > 1 else sorted({0} - {self._rank})

    def stop(self) -> None:
        """Stop, and wait for the thread: one that is inside the store when the interpreter ends aborts the process."""
        self._stopped.set()
        self._thread.join(HEARTBEAT_TIMEOUT_S)


def _bytes_of(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def _beats_of(rank: int) -> str:
    return f"penstock/beats/{rank}"


# -- metrics among ranks -----------------------------------------------------------------------------------------------

_encode_metrics = msgspec.msgpack.Encoder(enc_hook=Tensor.item).encode
_decode_metrics = msgspec.msgpack.Decoder(dict[str, tuple[str, Any]]).decode


def _kind(metric: Metric) -> str:
    kind = type(metric).__name__
    if METRICS.get(kind) is not type(metric):
        raise TypeError(f"expected metrics of {', '.join(METRICS)}, which other ranks can decode, got {metric!r}")
    return kind


def _metric(kind: str, numbers: Any) -> Metric:
    metric: Metric = convert(
        numbers, METRICS[kind], dec_hook=lambda _, number: torch.tensor(number, dtype=torch.float64)
    )
    return metric
