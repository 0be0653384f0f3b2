"""TrajectoryQueue with a trainer, environments and groups, in a word each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from penstock._stages.integrations.atropos.contract import EnvRegistration, TrainerRegistration
from penstock._stages.integrations.atropos.queue.records import Batch, Receipt, RequestRejected, Submission
from penstock._stages.integrations.atropos.queue.trajectory_queue import TrajectoryQueue

__all__ = [
    "admitted",
    "env",
    "group",
    "new_queue",
    "next_batch",
    "payloads",
    "receipt",
    "refused",
    "running_queue",
    "taken",
    "trainer",
]


def trainer(batch_size: int = 8, **other: Any) -> TrainerRegistration:
    said: dict[str, Any] = {
        "wandb_group": "group",
        "wandb_project": "project",
        "max_token_len": 1_024,
        "checkpoint_dir": "checkpoints",
        "save_checkpoint_interval": 10,
        "starting_step": 0,
        "num_steps": 100,
    }
    return TrainerRegistration(batch_size=batch_size, **said | other)


def env(
    group_size: int = 4,
    *,
    weight: float = 1.0,
    minimum: float | None = None,
    max_token_length: int = 1_024,
    name: str = "env",
) -> EnvRegistration:
    return EnvRegistration(
        max_token_length=max_token_length,
        desired_name=name,
        weight=weight,
        group_size=group_size,
        min_batch_allocation=minimum,
    )


def group(payload: Any = None, size: int = 4, *, env_id: int | None = None, nbytes: int = 1) -> Submission[Any]:
    return Submission(payload, sequences=size, nbytes=nbytes, env_id=env_id)


def receipt(buffered: int, buffer_size: int | None) -> Receipt:
    """Return the answer to a submission that was accepted for the first time."""
    return Receipt(buffered, buffer_size)


@contextmanager
def refused(status: int, message: str) -> Iterator[None]:
    """Expect that a request is refused with an HTTP status and a message, given as a pattern."""
    with pytest.raises(RequestRejected, match=message) as raised:
        yield
    assert raised.value.status == status


def new_queue() -> TrajectoryQueue[Any]:
    """Return a queue without a trainer."""
    return TrajectoryQueue()


def running_queue(*envs: EnvRegistration, batch_size: int = 8, **other: Any) -> TrajectoryQueue[Any]:
    """Return a queue whose trainer requested its first batch at 0, with these environments registered."""
    made: TrajectoryQueue[Any] = TrajectoryQueue(**other)
    made.register_trainer(trainer(batch_size))
    assert next_batch(made, 0) is None
    for each in envs:
        admitted(made, each)
    return made


def admitted(queue: TrajectoryQueue[Any], said: EnvRegistration, now: float = 0) -> int:
    admitted = queue.register_env(now, said)
    assert admitted is not None
    return admitted.env_id


def next_batch(queue: TrajectoryQueue[Any], now: float = 0) -> Batch[Any] | None:
    """Return the next batch, acknowledged at once."""
    one = queue.batch(now, lease_s=1)
    if one is not None:
        queue.acknowledge(now, one.lease)
    return one


def payloads(batch: Batch[Any] | None) -> list[Any] | None:
    return None if batch is None else [group.payload for group in batch.groups]


def taken(made: TrajectoryQueue[Any]) -> list[Any]:
    return list(iter(lambda: made.take(0), None))
