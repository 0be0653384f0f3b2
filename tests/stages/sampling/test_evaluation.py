"""A run evaluates beside training: in its workers, on several sets, and without any effect on what is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import pytest
import structlog
from tests.failsafe import FAILSAFE_S
from tests.fake_policy import Letters
from tests.stages.sampling.runs import SAMPLED, Adds, Broken, BrokenForSome, Counts, Sums, evaluation, pipeline, ran

from penstock import Context, RewardBridge, SourceEnv, TrajectoryGroup, Worker
from penstock.channels import memory_channel
from penstock.errors import InvalidConfig
from penstock.policies import NoOpPolicy
from penstock.rewards import RewardFunction, RewardInput
from penstock.testing import entered


async def test_weights_are_evaluated_before_the_first_step_every_k_steps_and_after_the_last() -> None:
    lines, _ = await ran(pipeline(evaluation(), steps=4))

    assert list(lines.evaluations) == [0, 2, 4]
    assert lines.evaluations[4] == {
        "eval/sums/mean@1": 0.8,
        "eval/sums/reward": 0.8,
        "eval/sums/response_length": 4.0,
        "eval/sums/missing": 0.0,
    }


async def test_beside_rollouts_the_newest_step_that_is_due_is_evaluated_and_the_last_one_always() -> None:
    lines, _ = await ran(pipeline(evaluation(), max_lag=1, steps=40))

    steps = list(lines.evaluations)
    assert (steps[0], steps[-1]) == (0, 40)
    assert all(step % 2 == 0 for step in steps)


async def test_the_last_step_is_evaluated_too_where_it_is_given() -> None:
    lines, _ = await ran(pipeline(evaluation(every=3, last=4), steps=4))

    assert list(lines.evaluations) == [0, 3, 4]


@dataclass(frozen=True)
class Watched(Sums):
    """Appends what the stages of a run wait for, whenever an answer is scored."""

    seen: list[str] = field(default_factory=list)
    statistics: list[Callable[[], Any]] = field(default_factory=list)

    def score_answer(self, answer: str, entry: Mapping[str, Any]) -> float:
        self.seen.extend(stage.waiting_for for now in self.statistics for stage in now().stages)
        return super().score_answer(answer, entry)


async def test_a_run_that_waits_for_an_evaluation_says_so_with_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock._stages.sampling.evaluator.PROGRESS_S", 0)
    watched = Watched(100, 5)
    run = pipeline(evaluation(lambda: watched), steps=2)
    watched.statistics.append(run.statistics)

    await ran(run)

    waits = [wait for wait in watched.seen if wait]
    assert "evaluation of step 0, 0 of 5 prompts" in waits
    assert {wait for wait in waits if "evaluation" not in wait} <= {
        "records from SourceEnv", "records from Batcher", "credit from Batcher"
    }  # fmt: skip


async def test_an_evaluation_does_not_change_what_is_trained_nor_the_ledger() -> None:
    with_it, without = Counts(), Counts()

    _, balance = await ran(pipeline(evaluation(**SAMPLED), trainer=with_it))
    _, expected = await ran(pipeline(None, trainer=without))

    assert with_it.batches == without.batches
    assert balance["ended"] == expected["ended"]
    assert balance["reasons"]["trained"] == expected["reasons"]["trained"]


async def test_a_schedule_that_is_synchronous_evaluates_between_two_steps() -> None:
    lines, _ = await ran(pipeline(evaluation(every=1), steps=3))

    found = [(step, metrics.get("eval/step")) for step, metrics in lines.lines]
    assert found == [(1, 0), (2, 1), (3, 2), (3, 3)]


async def test_of_several_completions_the_mean_pass_at_k_and_the_majority_are_reported() -> None:
    lines, _ = await ran(pipeline(evaluation(**SAMPLED)))

    metrics = lines.evaluations[0]
    assert {name for name in metrics if "@" in name} == {
        f"eval/sums/{name}" for name in ("mean@4", "pass@2", "pass@4", "maj@4")
    }
    assert 0.8 < metrics["eval/sums/mean@4"] < metrics["eval/sums/pass@2"] <= metrics["eval/sums/pass@4"] == 1
    assert lines.evaluations[0] == lines.evaluations[4]


async def test_each_set_has_its_own_metrics() -> None:
    sets = {"easy": partial(Sums, 100, 2), "hard": partial(Sums, 102, 1)}

    lines, _ = await ran(pipeline(evaluation(sets=sets)))

    assert lines.evaluations[2]["eval/easy/mean@1"] == 1
    assert lines.evaluations[2]["eval/hard/mean@1"] == 0


async def test_a_set_that_cannot_be_scored_has_no_mean_and_ends_nothing() -> None:
    sets = {"broken": partial(Broken, 100, 70), "sums": partial(Sums, 100, 5)}

    with structlog.testing.capture_logs() as logs:
        lines, balance = await ran(pipeline(evaluation(sets=sets)))

    assert balance["ended"]["trained"] == 4 * 4 * 2
    broken = {name: value for name, value in lines.evaluations[4].items() if "broken" in name}
    assert broken == {"eval/broken/missing": 70}
    assert lines.evaluations[4]["eval/sums/mean@1"] == 0.8
    (warning, *_) = [log for log in logs if log["event"] == "evaluation_incomplete"]
    assert (warning["set"], warning["missing"]) == ("broken", 70)
    assert "no score today" in warning["reasons"]
    assert "64 rollouts" in warning["failure"]


def out_of_order(completion: RewardInput) -> float:
    raise RuntimeError(f"out of order for {completion.text}")


async def test_a_reward_function_that_always_fails_leaves_no_mean_and_ends_nothing() -> None:
    rewards = RewardBridge(functions=[RewardFunction(out_of_order)])

    with structlog.testing.capture_logs() as logs:
        lines, balance = await ran(pipeline(evaluation(partial(Sums, 100, 70), rewards=rewards)))

    assert balance["ended"]["trained"] == 4 * 4 * 2
    assert lines.evaluations[4]["eval/sums/missing"] > 0
    assert "eval/sums/mean@1" not in lines.evaluations[4]
    (warning, *_) = [log for log in logs if log["event"] == "evaluation_incomplete"]
    assert "out_of_order" in warning["failure"]


async def test_prompts_without_a_score_are_missing_from_every_mean() -> None:
    lines, _ = await ran(pipeline(evaluation(partial(BrokenForSome, 100, 5))))

    assert lines.evaluations[0]["eval/sums/missing"] == 1
    assert lines.evaluations[0]["eval/sums/mean@1"] == 0.75


async def test_an_evaluation_that_exceeds_its_time_is_told_and_ends_nothing() -> None:
    lines, balance = await ran(pipeline(evaluation(timeout_s=1e-9)))

    assert lines.evaluations[2] == {"eval/sums/missing": 5}
    assert balance["ended"]["trained"] == 4 * 4 * 2


def test_a_source_that_ends_by_itself_cannot_evaluate() -> None:
    with pytest.raises(InvalidConfig, match="expected groups=None"):
        SourceEnv(Sums, NoOpPolicy(), groups=3, evaluation=evaluation())


def test_several_greedy_completions_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="expected 1 with greedy sampling"):
        evaluation(samples=2)


async def test_a_set_without_a_length_is_refused_before_anything_is_sampled() -> None:
    with pytest.raises(Exception, match="expected an environment with a length"):
        await ran(pipeline(evaluation(object)))


class NoneLeft:
    """No prompts are assigned any more."""

    async def next(self, room: int = 1) -> tuple[()]:  # noqa: ARG002 (the protocol's)
        return ()


@pytest.mark.parametrize(("place", "mean"), [(0, 0.8), (3, None)])
async def test_of_workers_that_are_assigned_prompts_the_first_evaluates_all_and_each_returns_when_none_are_left(
    place: int, mean: float | None
) -> None:
    stage = SourceEnv(Sums, Adds(), Letters(), group_size=2, evaluation=evaluation())
    outbox, inbox = memory_channel[TrajectoryGroup](1)
    context = Context(worker=Worker(place, 1), assignments=NoneLeft())

    with entered(context), anyio.fail_after(FAILSAFE_S):
        async with outbox, inbox:
            await stage.run(outbox)

    assert context.metrics.emit(0).get("eval/sums/mean@1") == mean
