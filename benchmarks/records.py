"""The record of every contestant: groups of trajectories with four 4-byte columns over tokens, and a loss mask.

A producer sends `KINDS` prebuilt groups in turn, because building is not transport, under ascending numbers. A token
depends on its producer, on the kind of its group and on its position, so that a wrong batch is detected. `Checker` does
that at the same small cost for every contestant.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock import TrainBatch, TrajectoryGroup

__all__ = [
    "COLUMNS",
    "ROW",
    "Checker",
    "Packing",
    "Plain",
    "WrongContents",
    "as_bytes",
    "batch_tokens",
    "make_groups",
    "plain",
    "trajectory_bytes",
]

PRIME = 1_000_003

KINDS = 2
"""Different groups that a producer sends in turn."""

CHECK_WHOLE_EVERY = 128
"""Interval of batches of which every byte is checked; of the others the edges are."""

BATCH_TOKENS = 64 * 1024
"""Tokens of a packed batch, unless one group holds more."""

COLUMNS: dict[str, np.dtype[Any]] = {
    "tokens": np.dtype(np.int32),
    "loss_mask": np.dtype(np.bool_),
    "behavior_logprobs": np.dtype(np.float32),
    "advantages": np.dtype(np.float32),
    "ref_logprobs": np.dtype(np.float32),
}
"""Columns over the tokens of a record."""

EDGED = ("behavior_logprobs", "advantages", "ref_logprobs")
"""Columns of which one in turn is checked at the edges of each group; tokens are checked at those of each sequence."""

ROW = np.dtype(
    [
        ("length", np.int64),
        ("reward", np.float32),
        ("policy_version", np.int64),
        ("stop_reason", np.uint8),
        ("repetition_id", np.int64),
    ]
)
"""Fields of a sequence of a record, in the form of peers."""


class WrongContents(AssertionError):
    """A batch differs from the sent records."""


class Plain(NamedTuple):
    """A group without penstock's classes, for peers."""

    env: str
    instance_id: str
    meta: dict[str, Any]
    rows: NDArray[Any]
    """[S] of ROW."""
    columns: Sequence[Any]
    """Arrays, or other buffers, in the order of COLUMNS; [N] each."""


def trajectory_bytes(tokens: int) -> int:
    """Return the bytes of a trajectory that the limit copies: four columns and some metadata, but not the mask."""
    return 4 * 4 * tokens + 320


def as_bytes(buffer: Any) -> memoryview:
    """Return an array, or another buffer, as plain bytes."""
    return memoryview(buffer).cast("B")


def batch_tokens(group: int, tokens: int) -> int:
    """Return the number of tokens of a batch."""
    return max(BATCH_TOKENS, group * tokens)


def env_of(producer: int) -> str:
    """Return the name of a producer's environment."""
    return f"bench-{producer}"


def make_groups(producer: int, *, group: int, tokens: int, advantages: bool = True) -> list[TrajectoryGroup]:
    """Return the groups that producer number `producer` sends in turn."""
    groups = []
    for kind in range(KINDS):
        length = group * tokens
        column = (np.arange(length, dtype=np.int64) * 7 + producer * PRIME + kind) % (2**31 - 1)
        floats = column.astype(np.float32)
        groups.append(
            TrajectoryGroup.build(
                env=env_of(producer),
                instance_id=str(kind),
                tokens=column,
                offsets=np.arange(group + 1) * tokens,
                loss_mask=np.arange(length) % tokens > 0,
                rewards=(np.arange(group) + kind) % 7,
                behavior_logprobs=-np.abs(floats),
                advantages=floats if advantages else None,
                ref_logprobs=floats + 1,
                meta={"model": "bench", "temperature": 1.0},
            )
        )
    return groups


def plain(group: TrajectoryGroup) -> Plain:
    """Return the record in the form of peers."""
    rows = np.empty(len(group), ROW)
    rows["length"] = group.lengths()
    rows["reward"] = group.rewards
    rows["policy_version"] = group.policy_versions
    rows["stop_reason"] = group.stop_reasons
    rows["repetition_id"] = group.rollout_ids
    return Plain(group.env, group.instance_id, group.meta, rows, tuple(getattr(group, name) for name in COLUMNS))


class Packed(NamedTuple):
    """A batch that a peer's consumer packed."""

    groups: list[PlainGroup]
    rows: NDArray[Any]
    cu_seqlens: NDArray[np.int64]
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    behavior_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    ref_logprobs: NDArray[np.float32]

    @property
    def rewards(self) -> NDArray[np.float32]:
        """Return [B] the rewards."""
        return self.rows["reward"]

    @property
    def rollout_ids(self) -> NDArray[np.int64]:
        """Return [B] the repetition ids."""
        return self.rows["repetition_id"]


class PlainGroup(NamedTuple):
    """The sequences of a batch that came from one group."""

    env: str
    instance_id: str
    sequences: int
    meta: dict[str, Any]


class Packing:
    """Packs peers' records at the least cost in Python: reused memory, and one copy for each column.

    Peers do not pay for the checks and counts of penstock's own `Packer`. Two batches alternate, so one is valid until
    the next but one is begun.
    """

    def __init__(self, group: int, tokens: int) -> None:
        self.max_tokens = batch_tokens(group, tokens)
        sequences = self.max_tokens // tokens
        self._memories = itertools.cycle([_Memory(self.max_tokens, sequences) for _ in range(2)])
        self._open()

    def _open(self) -> None:
        self._memory = next(self._memories)
        self._groups: list[PlainGroup] = []
        self._tokens = 0
        self._sequences = 0

    def fits(self, record: Plain) -> bool:
        """Return whether `record` has room in the batch that is being filled."""
        return self._tokens + len(record.columns[1]) <= self.max_tokens

    def add(self, record: Plain) -> None:
        """Copy `record` in."""
        first, sequences = self._tokens, len(record.rows)
        for (view, itemsize), column in zip(self._memory.views, record.columns, strict=True):
            source = as_bytes(column)
            view[first * itemsize : first * itemsize + len(source)] = source
        self._memory.rows[self._sequences : self._sequences + sequences] = record.rows
        self._groups.append(PlainGroup(record.env, record.instance_id, sequences, record.meta))
        self._tokens += len(record.columns[1])
        self._sequences += sequences

    def pack(self) -> Packed:
        """Return the filled batch, and begin the next one."""
        rows = self._memory.rows[: self._sequences]
        bounds = np.zeros(self._sequences + 1, np.int64)
        np.cumsum(rows["length"], out=bounds[1:])
        packed = Packed(self._groups, rows, bounds, *(column[: self._tokens] for column in self._memory.columns))
        self._open()
        return packed


class _Memory:
    """The memory of one batch."""

    def __init__(self, tokens: int, sequences: int) -> None:
        self.rows = np.zeros(sequences, ROW)
        self.columns = [np.zeros(tokens, dtype) for dtype in COLUMNS.values()]
        self.views = [(as_bytes(column), column.itemsize) for column in self.columns]


Batch: TypeAlias = TrainBatch | Packed
"""A batch that can be checked."""


class Checker:
    """Compares batches with the sent records: detects wrong, lost, duplicated, torn or swapped records.

    In every batch: each producer's groups arrive in order without a gap, every sequence begins and ends with its own
    tokens, and every group with its own values of one further column, another with each batch. In every 128th: every
    byte. That takes 8 µs for a batch of eight groups (measured), half of it waiting for memory.
    """

    def __init__(self, *, producers: int, group: int, tokens: int) -> None:
        self._group = group
        self._streams = {
            env_of(producer): _Stream(make_groups(producer, group=group, tokens=tokens))
            for producer in range(producers)
        }
        self._batches = 0
        sequences = max(BATCH_TOKENS // tokens, group)
        self._bounds = np.arange(sequences + 1) * tokens
        self._edges = _edges(self._bounds)
        self._group_edges = _edges(self._bounds[::group])

    @property
    def received(self) -> int:
        """Return the number of groups so far."""
        return sum(stream.number for stream in self._streams.values())

    @property
    def all_producers_send(self) -> bool:
        """Return whether a group has arrived from every producer."""
        return all(stream.number for stream in self._streams.values())

    def check(self, batch: Batch) -> None:
        """Check one batch, the next in order.

        Raises:
            WrongContents: naming what differs.
        """
        kinds = self._expected_kinds(batch)
        sequences = len(kinds) * self._group
        bounds = self._bounds[: sequences + 1]
        if batch.cu_seqlens.tobytes() != bounds.tobytes() or len(batch.tokens) != bounds[-1]:
            raise WrongContents(f"expected {sequences} sequences of {bounds[1]} tokens, got others")
        further = EDGED[self._batches % len(EDGED)]
        for name, edges in ("tokens", self._edges[: 2 * sequences]), (further, self._group_edges[: 2 * len(kinds)]):
            found = _column(batch, name).take(edges, mode="clip").tobytes()
            if found != b"".join([kind.edges[name] for kind in kinds]):
                raise WrongContents(f"{name}: a sequence begins or ends with other values than were sent")
        if self._batches % CHECK_WHOLE_EVERY == 0:
            self._check_whole(batch, kinds)
        self._batches += 1

    def _expected_kinds(self, batch: Batch) -> list[_Kind]:
        """Return the expected kind of each group of the batch, by its producer and its number."""
        kinds = []
        for group in batch.groups:
            stream = self._streams.get(group.env)
            if stream is None:
                raise WrongContents(f"expected a group of {sorted(self._streams)}, got one of {group.env!r}")
            if group.instance_id != str(stream.number) or group.sequences != self._group:
                raise WrongContents(
                    f"{group.env}: expected group {stream.number} with {self._group} sequences, "
                    f"got {group.instance_id} with {group.sequences}"
                )
            kinds.append(stream.kinds[stream.number % KINDS])
            stream.number += 1
        return kinds

    def _check_whole(self, batch: Batch, kinds: list[_Kind]) -> None:
        if batch.rewards.tobytes() != b"".join(kind.rewards for kind in kinds):
            raise WrongContents("a reward differs from what was sent")
        if batch.rollout_ids.tobytes() != np.tile(np.arange(self._group), len(kinds)).tobytes():
            raise WrongContents("a repetition id differs from what was sent")
        tokens = int(self._bounds[self._group])
        for name in COLUMNS:
            column = _column(batch, name)
            for index, kind in enumerate(kinds):
                if _digest(column[index * tokens : (index + 1) * tokens]) != kind.digests[name]:
                    raise WrongContents(f"{name}: a value of group {index} differs from what was sent")

    def finish(self, sent: Mapping[int, int]) -> None:
        """Compare the number of received groups with the number that every producer sent.

        Raises:
            WrongContents: naming the producer.
        """
        for producer, count in sent.items():
            received = self._streams[env_of(producer)].number
            if received != count:
                raise WrongContents(f"producer {producer} sent {count} groups, {received} arrived")


class _Stream:
    """The groups of one producer, and the number that has arrived."""

    def __init__(self, groups: Sequence[TrajectoryGroup]) -> None:
        self.kinds = [_Kind(group) for group in groups]
        self.number = 0


class _Kind:
    """The expected content of a group."""

    def __init__(self, group: TrajectoryGroup) -> None:
        ends = group.offsets[[0, -1]]
        self.edges = {name: getattr(group, name)[_edges(ends)].tobytes() for name in EDGED}
        self.edges["tokens"] = group.tokens[_edges(group.offsets)].tobytes()
        self.digests = {name: _digest(getattr(group, name)) for name in COLUMNS}
        self.rewards = group.rewards.tobytes()


def _edges(bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first and the last index of each span."""
    return np.stack([bounds[:-1], bounds[1:] - 1], axis=1).ravel()


def _column(batch: Batch, name: str) -> NDArray[Any]:
    column: NDArray[Any] | None = getattr(batch, name)
    if column is None or column.dtype != COLUMNS[name]:
        raise WrongContents(f"{name}: expected {COLUMNS[name]}, got {None if column is None else column.dtype}")
    return column


def _digest(column: NDArray[Any]) -> int:
    return xxhash.xxh3_64_intdigest(as_bytes(column))
