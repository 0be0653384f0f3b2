"""Ranks: the processes of a torchrun that train one model together, as a trainer sees them.

Rank 0 leads: it sends commands (`send_command`), and all ranks execute them together. Commands have a process group of
their own without a timeout, because sampling may take long; collective operations have the timeout of the default
group. Every rank sends heartbeats to the store of the process group, so that the others can name the rank that failed
when a connection breaks. No received data is unpickled. Knows no channel and no model.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..._pipeline.errors import PeerLost
from ..losses.metrics import EffectiveSamples, Extreme, Mean, Metric, TokensUsed, merge

HEARTBEAT_S = 0.25
"""Interval of the heartbeats of a rank."""

HEARTBEAT_TIMEOUT_S = 3.0
"""A rank without a heartbeat for this time after a connection broke is lost."""

FOREVER = timedelta(days=3650)

METRICS: dict[str, Any] = {each.__name__: each for each in (EffectiveSamples, Extreme, Mean, TokensUsed)}


class Ranks:
    """This process among those of the default process group."""

    def __init__(self) -> None:
        self.index: int = dist.get_rank()
        self.count: int = dist.get_world_size()
        self._commands: Any = dist.new_group(backend="gloo", timeout=FOREVER)
        """Group for commands, which other ranks await while the leader waits for a batch."""
        world: Any = dist.group.WORLD
        self._work: Any = world if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        """Group for tensors on the host."""
        self._timeout: timedelta = self._work._get_backend(torch.device("cpu")).options._timeout  # noqa: SLF001
        """Bound on the time in which the others receive a command."""
        self._heartbeat = _Heartbeat(self.index)

    def __repr__(self) -> str:
        return f"<Ranks: {self.index} of {self.count}>"

    # -- commands of the leader ----------------------------------------------------------------------------------------

    def send_command(self, command: int, payloads: Sequence[bytes] = ()) -> None:
        """Send `command` from the leader to all other ranks, with a payload for each, if there are any."""
        with self.connected():
            sent: list[Any] = [
                dist.isend(tensor, rank, group=self._commands)
                for rank, each in enumerate(payloads or [b""] * (self.count - 1), start=1)
                for tensor in (torch.tensor([command, len(each)]), _bytes_of(each))
                if len(tensor)
            ]
            for each in sent:
                each.wait(self._timeout)

    def receive_command(self) -> tuple[int, bytes]:
        """Wait for the next command of the leader, on another rank; return it with its payload."""
        with self.connected():
            header = torch.empty(2, dtype=torch.int64)
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

    def merged(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Return the metrics of all ranks, merged; the same on every one.

        Raises:
            TypeError: a metric is of an unknown class.
        """
        mine = _encode_metrics({name: (_kind(metric), metric) for name, metric in metrics.items()})
        padded = torch.zeros(self.maximum(len(mine)), dtype=torch.uint8)
        padded[: len(mine)] = _bytes_of(mine)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        dist.all_gather(lengths, torch.tensor([len(mine)]), group=self._work)
        gathered = [torch.empty_like(padded) for _ in range(self.count)]
        dist.all_gather(gathered, padded, group=self._work)
        merged: dict[str, Metric] = {}
        for length, encoded in zip(lengths, gathered, strict=True):
            decoded = _decode_metrics(encoded[: int(length)].numpy().tobytes())
            merge(merged, {name: _metric(*each) for name, each in decoded.items()})
        return merged

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Name the lost rank if a connection breaks within the body.

        Raises:
            PeerLost: a rank is lost; the message names it.
        """
        try:
            yield
        except RuntimeError as error:
            if lost := self._heartbeat.lost_ranks(self.count):
                names = " and ".join(f"rank {rank}" for rank in lost)
                raise PeerLost(f"{names} of {self.count} died, or hangs: the others cannot continue") from error
            raise

    def close(self) -> None:
        """Stop the heartbeats."""
        self._heartbeat.stop()


class _Heartbeat:
    """Sends the heartbeats of this rank, and checks those of the others."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._store: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001 (the store of the process group)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="penstock rank", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        try:
            while not self._stopped.wait(HEARTBEAT_S):
                self._store.add(_beats_of(self._rank), 1)
        except RuntimeError:
            """The store ended with its process; `lost_ranks` reports that."""

    def lost_ranks(self, count: int) -> list[int]:
        """Return the ranks without a heartbeat for `HEARTBEAT_TIMEOUT_S`; rank 0 if its store is closed."""
        others = set(range(count)) - {self._rank}
        deadline = time.monotonic() + HEARTBEAT_TIMEOUT_S
        try:
            first = {rank: self._store.add(_beats_of(rank), 0) for rank in others}
            while others and time.monotonic() < deadline:
                time.sleep(HEARTBEAT_S)
                others -= {rank for rank in others if self._store.add(_beats_of(rank), 0) > first[rank]}
        except RuntimeError:
            return [0]
        return sorted(others)

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
    metric: Metric = msgspec.convert(
        numbers, METRICS[kind], dec_hook=lambda _, number: torch.tensor(number, dtype=torch.float64)
    )
    return metric
