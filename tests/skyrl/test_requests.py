"""What SkyRL asks for is answered, by prompt and repetition, whatever happens to it on the way."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.failsafe import FAILSAFE_S
from tests.fake_policy import FakePolicy
from tests.skyrl.flows import DropsTheFirst, InPieces, KilledOnce, RewardsTheRow, request, rewards_of, running, sampled
from tests.stages.sampling.failing_environments import AlwaysRaises, SucceedsOnce

from penstock import TrajectoryGroup, each, processes, source
from penstock.environments import RolloutResult
from penstock.errors import FlowEnded, FlowStalled, InvalidConfig, RolloutsFailed, StageFailed
from penstock.policies import NoOpPolicy, SamplingParams

ATTEMPTS = 3
"""Times that a repetition is asked for until it counts as failed."""

FAILURE_LIMIT = 64
"""Failures in a row, nothing trained in between, that end a run."""


def test_rows_that_come_in_pieces_and_out_of_order_find_their_request() -> None:
    with running(lambda asked: source(asked).then(sampled()).then(RewardsTheRow()).then(InPieces(held=3))) as flow:
        asked = flow.ask(
            request("7", 0, 1, 2, reward=100), request("70", 1, reward=200), request("7_1", 0, 11, reward=300)
        )

        assert [rewards_of(each) for each in asked] == [{0: 100, 1: 101, 2: 102}, {1: 201}, {0: 300, 11: 311}]


def test_a_prompt_that_is_asked_for_again_is_another_one() -> None:
    with running(sampled()) as flow:
        (first,) = flow.ask(request("7", 0))
        (again,) = flow.ask(request("7", 0))
        assert rewards_of(first) == rewards_of(again) == {0: 0}

        assert first.ids != again.ids


def test_a_request_is_sampled_with_skyrls_prompt_and_parameters() -> None:
    policy = FakePolicy(answer=lambda prompt: prompt.upper())
    with running(sampled(policy, sampling=SamplingParams(seed=3))) as flow:
        greedy = SamplingParams(greedy=True)
        asked = flow.ask(request("0", 0, prompt="ab"), request("1", 0, prompt="cd", sampling=greedy))
        for each in asked:
            rewards_of(each)

        tokens = [row.trajectory.tokens.tolist() for each in asked for row in each.rows.values() if row]
        assert [bytes(row).decode() for row in tokens] == ["abAB\0", "cdCD\0"]
        assert sorted(each.greedy for each in policy.requests) == [False, True]
        assert all(each.seed is not None for each in policy.requests)


class Numbered:
    """An outside environment whose reward is the number of the prompt."""

    async def rollout(self, task: int, repetition: int) -> RolloutResult:
        found = await SucceedsOnce().rollout(task, 0)
        return RolloutResult(turns=found.turns, reward=task + repetition / 10)


def test_a_row_of_skyrls_data_set_stands_for_a_prompt_of_the_environment() -> None:
    with running(sampled(NoOpPolicy(), Numbered)) as flow:
        assert [rewards_of(each) for each in flow.ask(request("31", 0, 1), request("4", 0))] == [
            {0: pytest.approx(31), 1: pytest.approx(31.1)},
            {0: pytest.approx(4)},
        ]


def test_a_name_that_is_no_number_is_refused_where_the_environment_has_prompts_of_its_own() -> None:
    with running(sampled(NoOpPolicy(), Numbered)) as flow:
        (asked,) = flow.ask(request("first", 0))

        with pytest.raises(StageFailed) as raised:
            rewards_of(asked)
        assert isinstance(raised.value.__cause__, InvalidConfig)
        assert "got 'first'" in str(raised.value)


def test_a_flow_that_samples_at_another_temperature_than_skyrls_fails() -> None:
    with running(lambda asked: source(asked).then(sampled()).then(each(at_half))) as flow:
        (asked,) = flow.ask(request("7", 0))

        with pytest.raises(StageFailed, match=r"of SkyRL's configuration, 1\.0, got 0\.5"):
            rewards_of(asked)


async def at_half(group: TrajectoryGroup) -> TrajectoryGroup:
    return msgspec.structs.replace(group, meta={**group.meta, "temperature": 0.5})


def test_what_a_stage_drops_is_sampled_again_under_a_new_id() -> None:
    with running(lambda asked: source(asked).then(sampled()).then(DropsTheFirst(ATTEMPTS - 1))) as flow:
        (asked,) = flow.ask(request("7", 0, 1))

        assert rewards_of(asked) == {0: 0, 1: 0}
        assert asked.resampled == 2 * (ATTEMPTS - 1)
        assert {each.instance_id for each in asked.ids} == {str(ATTEMPTS - 1)}
        assert flow.balance.ended["filtered"] == 2 * (ATTEMPTS - 1)


def test_only_the_repetitions_that_failed_are_sampled_again_and_then_given_up() -> None:
    with running(sampled(NoOpPolicy(), SucceedsOnce)) as flow:
        (asked,) = flow.ask(request("7", 0, 1, 2))

        assert rewards_of(asked) == {0: 1, 1: None, 2: None}
        assert flow.balance.ended["failed"] == 2 * ATTEMPTS
        assert flow.balance.admitted == 3 + 2 * (ATTEMPTS - 1)


def test_an_environment_that_always_fails_ends_the_flow_with_the_reasons() -> None:
    with running(sampled(NoOpPolicy(), AlwaysRaises)) as flow:
        asked = flow.ask(*(request(str(number), *range(8)) for number in range(FAILURE_LIMIT // 8 + 1)))

        found = [each.answered.exception(FAILSAFE_S) for each in asked]
        with pytest.raises(StageFailed) as raised:
            flow.thread.check(FAILSAFE_S)
        assert set(found) <= {None, raised.value}
        assert isinstance(raised.value.__cause__, RolloutsFailed)
        assert "no simulator" in str(raised.value)


def test_what_is_not_awaited_any_more_is_neither_sampled_again_nor_kept() -> None:
    with running(lambda asked: source(asked).then(sampled()).then(InPieces(held=2))) as flow:
        (withdrawn,) = flow.ask(request("7", 0))
        assert flow.withdraw(withdrawn) == ()
        (asked,) = flow.ask(request("8", 0))
        rewards_of(asked)

    assert withdrawn.rows == {}
    assert flow.balance.balanced
    assert flow.balance.reasons["rejected"] in ({"not awaited": 1}, {})  # it may not have been sent


def test_when_the_flow_ends_nothing_waits_for_it() -> None:
    with running(lambda asked: source(asked).then(sampled()).then(InPieces(held=2))) as flow:
        (asked,) = flow.ask(request("7", 0))

    assert isinstance(asked.answered.exception(FAILSAFE_S), FlowEnded)


def test_a_flow_has_stalled_only_when_skyrl_has_waited_for_it() -> None:
    with running(sampled()) as flow:
        flow.thread.check(0, began=time.monotonic() + FAILSAFE_S)
        with pytest.raises(FlowStalled, match="expected a sample within 0 s"):
            flow.thread.check(0)


def test_numbers_go_on_where_a_checkpoint_ends_because_ids_are_never_reused() -> None:
    with running(sampled(), number=40) as flow:
        (asked,) = flow.ask(request("7", 0))
        rewards_of(asked)

        assert [each.instance_id for each in asked.ids] == ["40"]
        requests: Any = flow.requests
        assert requests.state_dict() == {"number": 41}


def test_a_sampler_that_is_killed_loses_nothing_that_was_asked_for(tmp_path: Path) -> None:
    policy = KilledOnce(mark=str(tmp_path / "killed"))
    placed = processes(2, restarts=1)
    with running(lambda asked: source(asked).then(sampled(policy), on=placed).then(RewardsTheRow())) as flow:
        asked = flow.ask(*(request(str(number), 0, 1, reward=10 * number) for number in range(8)))

        assert [rewards_of(each) for each in asked] == [{0: 10 * n, 1: 10 * n + 1} for n in range(8)]
        (reason,) = flow.balance.reasons["lost"]
        assert "was killed by SIGKILL" in reason
        assert sum(each.resampled for each in asked) == flow.balance.ended["lost"]


def test_rollouts_that_fail_in_a_worker_are_sampled_again_though_no_record_follows() -> None:
    placed = processes(1)
    with running(lambda asked: source(asked).then(sampled(NoOpPolicy(), AlwaysRaises), on=placed)) as flow:
        asked = flow.ask(request("0", 0), request("1", 0, 1))

        assert [rewards_of(each) for each in asked] == [{0: None}, {0: None, 1: None}]
        assert flow.balance.ended["failed"] == 3 * ATTEMPTS


@pytest.mark.parametrize("field", ["groups", "first_task"])
def test_a_source_that_says_what_is_sampled_is_refused(field: str) -> None:
    with pytest.raises(InvalidConfig, match=rf"expected SourceEnv\.{field} to be"):
        sampled(**{field: 3})
