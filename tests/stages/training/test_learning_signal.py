"""Optimizer steps in a row without a gradient from rewards, and runs that have no others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
import structlog

from penstock import (
    AdvantageNormalizer,
    Batcher,
    Pipeline,
    SendChannel,
    SinkTrainer,
    TrainBatch,
    TrajectoryGroup,
    source,
)
from penstock.accounting import Ledger
from penstock.errors import NothingTrained
from penstock.testing import drive_sink, group


class Counting:
    def step(self, batch: TrainBatch, /) -> dict[str, float]:
        return {"groups": len(batch.groups)}


def batch(
    number: int,
    *rewards: list[float],
    advantage: float = 0.0,
    parts: dict[str, list[float]] | None = None,
    trains: bool = True,
    teacher: bool = False,
) -> TrainBatch:
    """Return a batch of one group for each list of rewards."""
    return TrainBatch.pack(
        made(f"{number}.{place}", each, advantage, parts or {}, trains=trains, teacher=teacher)
        for place, each in enumerate(rewards)
    )


def made(name: str, rewards: list[float], advantage: float, parts: dict[str, list[float]], **columns: bool) -> Any:
    plain = group(instance_id=name, completion_lengths=[2] * len(rewards), rewards=rewards)
    tokens = len(plain.tokens)
    changes: dict[str, Any] = {
        "advantages": np.full(tokens, advantage, np.float32),
        "reward_parts": {part: np.array(values, np.float32) for part, values in parts.items()},
    }
    if not columns["trains"]:
        changes["loss_mask"] = np.zeros(tokens, np.bool_)
    if columns["teacher"]:
        changes["teacher_ids"] = np.zeros((tokens, 1), np.int32)
        changes["teacher_logprobs"] = np.zeros((tokens, 1), np.float32)
    return msgspec.structs.replace(plain, **changes)


async def warnings_of(*batches: TrainBatch) -> list[Any]:
    with structlog.testing.capture_logs() as events:
        await drive_sink(SinkTrainer(Counting()), list(batches))
    return [event for event in events if event["event"] == "no_learning_signal"]


EQUAL, APART = [0.5, 0.5], [1.0, 1.0]


@pytest.mark.parametrize(
    ("alike", "constant"),
    [
        (lambda n: batch(n, EQUAL, EQUAL), "rewards: each is 0.5"),
        (lambda n: batch(n, EQUAL, APART), "rewards within every group"),
        (
            lambda n: batch(n, EQUAL, parts={"score": [0.25, 0.25], "length": [1, 2]}),
            "rewards: each is 0.5 (constant: score; not: length)",
        ),
        (lambda n: batch(n, [0, 1], [1, 0]), "advantages: each is 0, although rewards differ within groups"),
        (lambda n: batch(n, [0, 1], trains=False), "the loss mask: no token trains"),
    ],
    ids=["all rewards", "in each group", "parts", "advantages", "loss mask"],
)
async def test_three_steps_in_a_row_without_a_gradient_warn_once_of_what_is_constant(alike: Any, constant: str) -> None:
    (warning,) = await warnings_of(*map(alike, range(7)))

    assert (warning["step"], warning["steps_in_a_row"], warning["constant"]) == (3, 3, constant)


async def test_a_step_with_a_gradient_ends_the_row() -> None:
    learns = batch(2, [0, 1], advantage=1.0)

    assert not await warnings_of(batch(0, EQUAL), batch(1, EQUAL), learns, batch(3, EQUAL), batch(4, EQUAL))


async def test_a_batch_with_a_teacher_learns_from_that() -> None:
    assert not await warnings_of(*(batch(number, EQUAL, teacher=True) for number in range(4)))


@dataclass(frozen=True)
class Rewarded:
    """Sends a group of two trajectories for each pair of rewards."""

    rewards: list[list[float]]

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        for number, pair in enumerate(self.rewards):
            await outbox.send(group(instance_id=str(number), completion_lengths=[2, 2], rewards=pair))


@dataclass
class Resumed(Counting):
    """A trainer that has done `steps` before."""

    steps: int
    committed: Mapping[Any, int] = field(default_factory=dict)

    def save(self, folder: Any, committed: Any, /) -> Any:
        raise NotImplementedError


def pipeline(*rewards: list[float], trainer: Any = None) -> Pipeline:
    """Return a pipeline with an optimizer step for each pair of rewards."""
    compared = source(Rewarded(list(rewards))).then(AdvantageNormalizer("grpo"))
    return compared.then(Batcher(max_tokens=64, sequences=2)).sink(SinkTrainer(trainer or Counting()))


@pytest.mark.parametrize(
    ("rewards", "constant"),
    [
        ([[0, 0]] * 3, "rewards: each is 0."),
        ([[1, 1]] * 5, "rewards: each is 1."),
        ([[0, 0], [1, 1], [0.5, 0.5]], "rewards: each is 0.5."),
    ],
)
async def test_a_run_without_any_gradient_ends_with_an_error(rewards: list[list[float]], constant: str) -> None:
    run = pipeline(*rewards)

    with pytest.raises(NothingTrained, match="expected a run that learns from its rewards") as raised:
        await run.run()

    assert f"no gradient from rewards in {len(rewards)} steps: {constant}" in str(raised.value)
    assert run.report is not None
    assert run.report.balance.ended["trained"] == 2 * len(rewards)
    assert "nothing: no gradient from rewards" in str(run.report)


async def test_a_run_of_two_steps_without_a_gradient_warns_at_its_end() -> None:
    with structlog.testing.capture_logs() as events:
        report = await pipeline(EQUAL, EQUAL).run()

    assert [event["constant"] for event in events if event["event"] == "no_learning_signal"] == ["rewards: each is 0.5"]
    assert report.nothing_learned == "no gradient from rewards in 2 steps: rewards: each is 0.5"


@pytest.mark.parametrize("learns", [0, 2, 4])
async def test_one_step_with_a_gradient_is_enough(learns: int) -> None:
    rewards: list[list[float]] = [[0, 1] if step == learns else EQUAL for step in range(5)]

    report = await pipeline(*rewards).run()

    assert (report.nothing_learned, report.steps) == ("", 5)


async def test_a_policy_that_was_trained_before_may_have_learned_all_there_is() -> None:
    ledger = Ledger()
    ledger.restore({}, 7)

    report = await pipeline(*[EQUAL] * 3, trainer=Resumed(7)).run(ledger=ledger)

    assert report.steps == 10
    assert "in 3 steps" in report.nothing_learned
