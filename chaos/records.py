"""Records whose every byte is computed from their ids, and the comparison of received records with sent ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from penstock import GroupId, TrainBatch, TrajectoryGroup
from penstock.testing import group

__all__ = ["CorruptRecord", "check_batch", "check_record", "every_id", "record_of"]


class CorruptRecord(Exception):
    """A record differs from the one that was sent under its id."""


def record_of(lane: int, number: int) -> TrajectoryGroup:
    """Return record `number` of a lane: two trajectories whose length and content depend on both numbers."""
    lengths = [3 + number % 29, 40 + lane]
    return group(env=f"lane{lane}", instance_id=str(number), completion_lengths=lengths, seed=10**6 * lane + number)


def every_id(lanes: int, count: int) -> set[GroupId]:
    """Return the ids of `count` records of each lane."""
    return {GroupId(f"lane{lane}", str(number)) for lane in range(lanes) for number in range(count)}


def _sent(identity: GroupId) -> TrajectoryGroup:
    return record_of(int(identity.env.removeprefix("lane")), int(identity.instance_id))


def check_record(record: TrajectoryGroup) -> None:
    """Compare every column of `record` with that of the sent record.

    Raises:
        CorruptRecord: a column differs, is missing, or is extra.
    """
    sent, received = _sent(record.id).columns(), record.columns()
    different = [name for name in sent.keys() | received.keys() if not _equal(sent.get(name), received.get(name))]
    if different:
        raise CorruptRecord(f"expected {record.id} as it was sent, got other bytes in {sorted(different)}")


def _equal(sent: object, received: object) -> bool:
    if not (isinstance(sent, np.ndarray) and isinstance(received, np.ndarray)):
        return False
    return sent.dtype == received.dtype and sent.shape == received.shape and sent.tobytes() == received.tobytes()


def check_batch(batch: TrainBatch) -> None:
    """Compare tokens and log-probabilities of `batch` with those of the groups that it lists.

    Raises:
        CorruptRecord: they differ.
    """
    sent = [_sent(packed.id) for packed in batch.groups]
    _check_column(batch, "tokens", (each.tokens for each in sent))
    _check_column(batch, "behavior_logprobs", (each.behavior_logprobs for each in sent))


def _check_column(batch: TrainBatch, name: str, sent: Iterable[Any]) -> None:
    if not _equal(np.concatenate(list(sent)), getattr(batch, name)):
        raise CorruptRecord(f"expected {name} of {[packed.id for packed in batch.groups]} in a batch, got other bytes")
