"""The record that every contestant moves: groups of trajectories with four 4-byte columns over tokens.

A token is made from who sent it and where it stands, so that the consumer can tell a right batch from a wrong one.
"""

from __future__ import annotations

import numpy as np

from penstock import TrainBatch, TrajectoryGroup

__all__ = ["WrongContents", "check_batch", "make_groups", "trajectory_bytes"]

PRIME = 1_000_003


class WrongContents(AssertionError):
    """A batch holds something else than what was sent."""


def trajectory_bytes(tokens: int) -> int:
    """Bytes of one trajectory: four columns and some metadata."""
    return 4 * 4 * tokens + 320


def make_groups(producer: int, *, group: int, tokens: int, count: int) -> list[TrajectoryGroup]:
    """`count` groups that producer number `producer` sends in turn."""
    groups = []
    for number in range(count):
        length = group * tokens
        column = (np.arange(length, dtype=np.int64) * 7 + producer * PRIME + number) % (2**31 - 1)
        floats = column.astype(np.float32)
        groups.append(
            TrajectoryGroup.build(
                env=f"bench-{producer}",
                instance_id=str(number),
                tokens=column,
                offsets=np.arange(group + 1) * tokens,
                loss_mask=np.arange(length) % tokens > 0,
                rewards=np.full(group, number % 7, np.float32),
                behavior_logprobs=-np.abs(floats),
                advantages=floats,
                ref_logprobs=floats + 1,
                meta={"model": "bench", "temperature": 1.0},
            )
        )
    return groups


def check_batch(batch: TrainBatch, *, whole: bool = False) -> None:
    """Hold a batch against what was sent: the edges of every sequence, or (`whole`) every value.

    Raises:
        WrongContents: naming the group.
    """
    starts = batch.cu_seqlens[:-1]
    lengths = np.diff(batch.cu_seqlens)
    producers = np.repeat(
        [int(g.env.removeprefix("bench-")) for g in batch.groups], [g.sequences for g in batch.groups]
    )
    numbers = np.repeat([int(g.instance_id) for g in batch.groups], [g.sequences for g in batch.groups])
    first = (batch.repetition_ids * lengths * 7 + producers * PRIME + numbers) % (2**31 - 1)
    last = (first + (lengths - 1) * 7) % (2**31 - 1)
    if (batch.tokens[starts] != first).any() or (batch.tokens[batch.cu_seqlens[1:] - 1] != last).any():
        raise WrongContents("a sequence begins or ends with other tokens than were sent")
    if batch.advantages is None or batch.behavior_logprobs is None or batch.ref_logprobs is None:
        raise WrongContents("a column is missing")
    if whole:
        tokens = np.repeat(first, lengths) + batch.position_ids * 7
        if (batch.tokens != tokens % (2**31 - 1)).any():
            raise WrongContents("a token differs from what was sent")
        floats = batch.tokens.astype(np.float32)
        same = (batch.advantages == floats) & (batch.ref_logprobs == floats + 1) & (batch.behavior_logprobs == -floats)
        if not same.all():
            raise WrongContents("a value differs from what was sent")
