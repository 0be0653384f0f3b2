"""Ranks: the processes of a torchrun that train one model together, as a trainer sees them.

Rank 0 leads: it says what all do next (`order`), and the others do it with it. What it says waits on a connection of
its own, without a limit, for sampling may take long; what all then do together has the limit of the process group.
Every rank beats to the store at which they met, so that when a connection breaks those who are left can say who is
gone. Nothing that is received is unpickled. Knows no channel and no model.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from heapq import heapify, heappop, heappush
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ..._pipeline.errors import PeerLost
from ..._schemas import TrainBatch
from ..losses import EffectiveSamples, Max, Mean, Metric, Min, TokensUsed, merge

__all__ = ["Ranks", "decode_share", "encode_share", "owners"]

HEARTBEAT_S = 0.25
"""How often a rank says that it is there."""

SILENCE_S = 3.0
"""A rank that has not said so for as long, after a connection broke, is gone."""

FOREVER = timedelta(days=3650)

METRICS: dict[str, Any] = {each.__name__: each for each in (EffectiveSamples, Max, Min, Mean, TokensUsed)}


class Ranks:
    """This process among those of the default process group."""

    def __init__(self) -> None:
        self.index: int = dist.get_rank()
        self.count: int = dist.get_world_size()
        self._orders: Any = dist.new_group(backend="gloo", timeout=FOREVER)
        """For what the leader says: it is waited for while the leader waits for a batch."""
        world: Any = dist.group.WORLD
        self._work: Any = world if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        """For numbers that are on the host."""
        self._limit: timedelta = self._work._get_backend(torch.device("cpu")).options._timeout  # noqa: SLF001
        """How long the others have to take what the leader says."""
        self._heart = _Heartbeat(self.index)

    def __repr__(self) -> str:
        return f"<Ranks: {self.index} of {self.count}>"

    # -- what the leader says ------------------------------------------------------------------------------------------

    def order(self, order: int, told: Sequence[bytes] = ()) -> None:
        """As the leader: have all others do `order`, with what each is told of it, if anything."""
        with self.connected():
            sent: list[Any] = [
                dist.isend(tensor, rank, group=self._orders)
                for rank, each in enumerate(told or [b""] * (self.count - 1), start=1)
                for tensor in (torch.tensor([order, len(each)]), _bytes_of(each))
                if len(tensor)
            ]
            for each in sent:
                each.wait(self._limit)

    def ordered(self) -> tuple[int, bytes]:
        """As another: wait for the next order, and what this rank is told of it."""
        with self.connected():
            header = torch.empty(2, dtype=torch.int64)
            dist.recv(header, 0, group=self._orders)
            order, length = header.tolist()
            told = torch.empty(length, dtype=torch.uint8)
            if length:
                dist.recv(told, 0, group=self._orders)
            return order, told.numpy().tobytes()

    # -- what all do together ------------------------------------------------------------------------------------------

    def most(self, number: int) -> int:
        """The largest `number` of any rank."""
        numbers = torch.tensor([number])
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._work)
        return int(numbers)

    def merged(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """The metrics of all ranks, merged; the same on every one.

        Raises:
            TypeError: a metric is of a kind of its own.
        """
        mine = msgspec.msgpack.encode({name: _told(metric) for name, metric in metrics.items()})
        padded = torch.zeros(self.most(len(mine)), dtype=torch.uint8)
        padded[: len(mine)] = _bytes_of(mine)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        dist.all_gather(lengths, torch.tensor([len(mine)]), group=self._work)
        all_told = [torch.empty_like(padded) for _ in range(self.count)]
        dist.all_gather(all_told, padded, group=self._work)
        merged: dict[str, Metric] = {}
        for length, told in zip(lengths, all_told, strict=True):
            heard = msgspec.msgpack.decode(told[: int(length)].numpy().tobytes(), type=dict[str, list[Any]])
            merge(merged, {name: _heard(each) for name, each in heard.items()})
        return merged

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Where a connection breaks within the body, say who is gone.

        Raises:
            PeerLost: a rank is; the message names it.
        """
        try:
            yield
        except RuntimeError as error:
            if gone := self._heart.silent(self.count):
                names = " and ".join(f"rank {rank}" for rank in gone)
                raise PeerLost(f"{names} of {self.count} died, or hangs: what all do together cannot go on") from error
            raise

    def close(self) -> None:
        """Beat no more."""
        self._heart.stop()


class _Heartbeat:
    """Says again and again that this rank is there, and knows who does not."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._store: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001 (where the ranks have met)
        self._stopped = threading.Event()
        threading.Thread(target=self._beat, name="penstock rank", daemon=True).start()

    def _beat(self) -> None:
        try:
            while not self._stopped.wait(HEARTBEAT_S):
                self._store.add(_beats_of(self._rank), 1)
        except RuntimeError:
            """The store has gone with the process that held it; whoever needs it will see."""

    def silent(self, count: int) -> list[int]:
        """Ranks from which nothing has been heard for `SILENCE_S`; whoever holds the store, where that is gone."""
        others = set(range(count)) - {self._rank}
        deadline = time.monotonic() + SILENCE_S
        try:
            first = {rank: self._store.add(_beats_of(rank), 0) for rank in others}
            while others and time.monotonic() < deadline:
                time.sleep(HEARTBEAT_S)
                others -= {rank for rank in others if self._store.add(_beats_of(rank), 0) > first[rank]}
        except RuntimeError:
            return [0]
        return sorted(others)

    def stop(self) -> None:
        self._stopped.set()


def _bytes_of(told: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(told, np.uint8).copy())


def _beats_of(rank: int) -> str:
    return f"penstock/beats/{rank}"


# -- a batch among ranks -----------------------------------------------------------------------------------------------


def owners(lengths: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """[B] which of `count` ranks trains each sequence, so that all have about as many tokens.

    The longest goes first, each to the rank that has the fewest tokens: at most a third more than the best division.
    Graham, "Bounds on Multiprocessing Timing Anomalies" (1969).

    >>> owners(np.array([2, 9, 4, 6]), 2).tolist()
    [0, 0, 1, 1]
    """
    taken = np.zeros(len(lengths), np.int64)
    loads = [(0, rank) for rank in range(count)]
    heapify(loads)
    for sequence in np.argsort(-lengths, kind="stable").tolist():
        load, rank = heappop(loads)
        taken[sequence] = rank
        heappush(loads, (load + int(lengths[sequence]), rank))
    return taken


def encode_share(share: TrainBatch) -> bytes:
    """A share of a batch, for the rank that trains it."""
    columns = {name: (array.dtype.str, array.shape, array.tobytes()) for name, array in share.columns().items()}
    return msgspec.msgpack.encode((share.header(), columns))


def decode_share(told: bytes) -> TrainBatch:
    """The inverse of `encode_share`."""
    header, columns = _decode(told)
    arrays = {name: np.frombuffer(data, dtype).reshape(shape) for name, (dtype, shape, data) in columns.items()}
    return TrainBatch.assemble(header, arrays)


_decode = msgspec.msgpack.Decoder(tuple[bytes, dict[str, tuple[str, tuple[int, ...], bytes]]]).decode


# -- metrics among ranks -----------------------------------------------------------------------------------------------


def _told(metric: Any) -> list[Any]:
    """A metric as its kind and what it holds: numbers, words, and metrics."""
    kind = type(metric).__name__
    if METRICS.get(kind) is not type(metric):
        raise TypeError(f"expected metrics of {', '.join(METRICS)}, which other ranks know, got {metric!r}")
    held = [getattr(metric, field.name) for field in fields(metric)]
    return [
        kind,
        *(each.item() if isinstance(each, Tensor) else each if isinstance(each, str) else _told(each) for each in held),
    ]


def _heard(told: list[Any]) -> Metric:
    kind, *held = told
    metric: Metric = METRICS[kind](
        *(
            _heard(each)
            if isinstance(each, list)
            else each
            if isinstance(each, str)
            else torch.tensor(each, dtype=torch.float64)
            for each in held
        )
    )
    return metric
