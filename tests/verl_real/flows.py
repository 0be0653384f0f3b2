"""Flows that verl's configuration names as `tests.verl_real.flows:…`."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import torch
from tests.trl_real.letters import Prompts, flow_of

from penstock import Flow, SendChannel, TrajectoryGroup, current, source
from penstock.models import HFModel
from penstock.torch import WeightFolder
from penstock.weights import WeightPublisher

GROUPS: list[TrajectoryGroup] = []
"""What `given` sends."""


@dataclass(frozen=True, slots=True)
class Given:
    """Sends groups, and then waits: a flow that ends is an error in verl's trainer."""

    groups: list[TrajectoryGroup]
    ends: bool = False

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        for group in self.groups:
            current().ledger.admit(group.id, group.rollout_ids.tolist())
            await outbox.send(group)
        if not self.ends:
            await anyio.sleep_forever()


@dataclass(frozen=True, slots=True)
class Failing:
    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:  # noqa: ARG002 (of the interface)
        raise ConnectionError("the server of the environments is gone")


def given(config: Any) -> Flow[TrajectoryGroup]:  # noqa: ARG001 (of the interface)
    return source(Given(GROUPS))


def ending(config: Any) -> Flow[TrajectoryGroup]:  # noqa: ARG001 (as above)
    return source(Given(GROUPS, ends=True))


def failing(config: Any) -> Flow[TrajectoryGroup]:  # noqa: ARG001 (as above)
    return source(Failing())


def group_of(number: int, rewards: list[float], **columns: Any) -> TrajectoryGroup:
    """Return a group of two turns a sequence, with an observation of two tokens between them."""
    count = len(rewards)
    given: dict[str, Any] = {
        "loss_mask": [[0, 0, 1, 1, 0, 0, 1, 1]] * count,
        "behavior_logprobs": [[0, 0, -0.5, -1.0 - place, 0, 0, -0.25, -0.125] for place in range(count)],
        "policy_versions": [0] * count,
    }
    tokens = [[5, 6, 10 + number, 11 + place, 7, 8, 12 + place, 0] for place in range(count)]
    return TrajectoryGroup.build(
        env="sums", instance_id=str(number), sequences=tokens, rewards=rewards, **given | columns
    )


def groups(count: int, *, rewards: tuple[float, ...] = (1.0, 0.0), **columns: Any) -> Iterator[TrajectoryGroup]:
    return (group_of(number, list(rewards), **columns) for number in range(count))


def letters(config: Any, **given: Any) -> Flow[TrajectoryGroup]:
    """Return a flow that samples letters with the weights that verl's trainer publishes."""
    rollout = config.actor_rollout_ref.rollout
    url = Path(rollout.checkpoint_engine.engine_kwargs.penstock.url_file).read_text()
    given = {"group_size": rollout.n, **rollout.custom.get("options", {}), **given}
    return flow_of(Path(config.actor_rollout_ref.model.path), url, **given)


class Deadly(Prompts):
    """The prompts of a sampler that is killed while it scores an answer, and so has others in flight."""

    def __init__(self, once: Path, answer: int) -> None:
        """Kill the process at its `answer`-th answer, and write the file; kill none if that is there."""
        self._once = once
        self._answer = answer
        self._scored = itertools.count(1)

    def score_answer(self, answer: str, entry: Any) -> float:
        if next(self._scored) == self._answer and not self._once.exists():
            self._once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().score_answer(answer, entry)


def deadly(config: Any) -> Flow[TrajectoryGroup]:
    """Return such a flow, whose sampler dies in the third step of 16, or at `dies_at`."""
    answer = config.actor_rollout_ref.rollout.custom.get("dies_at", 40)
    penstock = config.actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.penstock
    once = Path(penstock.url_file).with_name("killed")
    return letters(config, prompts=partial(Deadly, once, answer))


def publisher(model: str, url_file: str) -> AbstractAsyncContextManager[WeightPublisher]:
    """Return a publisher in the process of verl's actor, which writes down its URL."""
    return _naming(WeightPublisher(HFModel.empty(Path(model)).state_dict()), url_file)


def folder(folder: str) -> WeightFolder:
    """Return a publisher of one tensor."""
    return WeightFolder(folder, {"bias": torch.zeros(2)})


@asynccontextmanager
async def _naming(publisher: WeightPublisher, url_file: str) -> AsyncGenerator[WeightPublisher]:
    async with publisher:
        await anyio.Path(url_file).write_text(publisher.url)
        yield publisher
