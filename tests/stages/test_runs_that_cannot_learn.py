"""Runs of which nothing is trained end by name, and those that train rarely go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import structlog
from tests.fake_policy import FakePolicy, Letters
from tests.fixed_limits import set_limits
from tests.stages.sampling import failing_environments as environments

from penstock import (
    AdvantageNormalizer,
    Batcher,
    Pipeline,
    SinkTrainer,
    SourceEnv,
    TrainBatch,
    TruncationMask,
    here,
    processes,
    source,
)
from penstock.data import PromptDataset
from penstock.errors import NothingTrained
from penstock.policies import NoOpPolicy, SamplingParams

SHORT, LONG = {"prompt": "ok"}, {"prompt": "much longer"}
"""Prompts of 2 and of 11 tokens."""

HERE = here()

LEAST = 256
"""Trajectories at which a run warns, and ends at ten times as many: a quarter of those of a user."""


@pytest.fixture(autouse=True)
def _runs_end_after_fewer_trajectories(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, LEAST_WARNED_AT=LEAST)


class Counting:
    def step(self, batch: TrainBatch, /) -> dict[str, float]:
        return {"groups": len(batch.groups)}


def run_of(
    make_env: Callable[[], Any],
    *,
    on: Any = HERE,
    max_steps: int | None = None,
    max_lag: int | None = None,
    **batching: Any,
) -> Pipeline:
    env = SourceEnv(make_env, NoOpPolicy(), group_size=8)
    return (
        source(env, on=on, max_lag=max_lag)
        .then(AdvantageNormalizer("grpo"))
        .then(TruncationMask())
        .then(Batcher(max_tokens=4096, **batching))
        .sink(SinkTrainer(Counting(), max_steps=max_steps))
    )


def prompts_run(rows: list[dict[str, Any]], *, on: Any = HERE, max_steps: int | None = None) -> Pipeline:
    dataset = PromptDataset(rows, max_prompt_tokens=5, shuffle=False)
    sampling = SamplingParams(max_completion_tokens=4)
    env = SourceEnv(dataset, FakePolicy(), Letters(), group_size=8, sampling=sampling)
    return (
        source(env, on=on)
        .then(Batcher(max_tokens=4096, sequences=8))
        .sink(SinkTrainer(Counting(), max_steps=max_steps))
    )


def balance_of(pipeline: Pipeline) -> Any:
    assert pipeline.report is not None
    assert pipeline.report.balance.balanced
    return pipeline.report.balance


@pytest.mark.parametrize(
    ("make_env", "reason", "on"),
    [
        (environments.all_equal, "zero advantages", HERE),
        pytest.param(environments.all_cut, "nothing to train", processes(2), marks=pytest.mark.long),
    ],
    ids=["equal rewards", "all cut, in processes"],
)
async def test_a_run_whose_groups_are_all_filtered_warns_and_ends(
    make_env: Callable[[], Any], reason: str, on: Any
) -> None:
    pipeline = run_of(make_env, on=on, drop_zero_variance=True, sequences=8)

    with structlog.testing.capture_logs() as events, pytest.raises(NothingTrained, match=rf"filtered \(.*{reason}"):
        await pipeline.run()

    (warning,) = [event for event in events if event["event"] == "nothing_trained"]
    assert warning["in_a_row"] < 4 * LEAST
    assert 10 * LEAST <= balance_of(pipeline).ended["filtered"] < 14 * LEAST


IN_PROCESSES = pytest.param(processes(2), marks=pytest.mark.long)


@pytest.mark.parametrize("on", [HERE, IN_PROCESSES], ids=["here", "processes"])
async def test_a_run_whose_samplers_never_get_the_weights_ends_when_all_groups_are_stale(on: Any) -> None:
    pipeline = run_of(environments.all_different, on=on, max_lag=2, sequences=8)  # all rollouts have version 0

    with structlog.testing.capture_logs(), pytest.raises(NothingTrained, match=r"stale \(.*lag over 2.*max_lag"):
        await pipeline.run()

    assert balance_of(pipeline).ended["trained"] >= 3 * 8


async def test_one_trained_group_of_120_goes_on() -> None:
    pipeline = run_of(environments.one_in_120, drop_zero_variance=True, sequences=24, max_steps=1)

    with structlog.testing.capture_logs():
        report = await pipeline.run()

    assert report.steps == 1
    assert report.balance.ended["filtered"] > 10 * LEAST


@pytest.mark.parametrize("on", [here(), processes(2)], ids=["here", "processes"])
async def test_a_run_whose_prompts_are_all_too_long_ends_after_an_epoch(on: Any) -> None:
    pipeline = prompts_run([LONG] * 16, on=on)

    with pytest.raises(NothingTrained, match=r"none in a whole epoch: .* rejected \(.* × prompt longer than 5 tokens"):
        await pipeline.run()

    assert balance_of(pipeline).ended["rejected"] >= 16 * 8


@pytest.mark.parametrize("on", [here(), processes(2)], ids=["here", "processes"])
async def test_one_prompt_that_fits_is_enough(on: Any) -> None:
    report = await prompts_run([LONG] * 99 + [SHORT], on=on, max_steps=2).run()

    assert report.balance.ended["rejected"] >= 49 * 8  # those of one worker, where the other one has not begun


async def test_a_sink_that_returns_before_it_has_trained_is_no_success() -> None:
    class Impatient:
        async def run(self, inbox: Any) -> None: ...

    with pytest.raises(NothingTrained, match="expected a run that ends by itself to train"):
        await source(SourceEnv(environments.all_different, NoOpPolicy())).sink(Impatient()).run()
