"""Groups that nobody asked for answer SkyRL's prompts in the order in which they arrive, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.failsafe import FAILSAFE_S
from tests.skyrl.flows import Sends, arriving, request, rewards_of
from tests.stages.turns import of_turns

from penstock import TrajectoryGroup, TrajectoryId, source
from penstock._stages.integrations.skyrl.requests import withdraw
from penstock._stages.integrations.skyrl.samples import Asked, Rules, columns_of
from penstock.errors import FlowEnded, RolloutsFailed, StageFailed


def group(number: int = 0, size: int = 2, **columns: Any) -> TrajectoryGroup:
    """Return a group whose rewards are its number and the places of its rows."""
    given: dict[str, Any] = {"behavior_logprobs": [[0.0, -0.5, 0.0, -1.5]] * size}
    rewards = [10.0 * number + place for place in range(size)]
    return of_turns(*[".x.x"] * size, rewards=rewards, instance_id=str(number), **(given | columns))


def rejections(flow: Any) -> Any:
    return flow.balance.reasons["rejected"]


def test_the_next_group_answers_the_prompt_that_has_waited_longest() -> None:
    with arriving([group(1), group(2), group(3)]) as flow:
        asked = flow.ask(request("7", 0, 1), request("7", 4, 5), request("0", 1, 0))

        assert [rewards_of(each) for each in asked] == [{0: 10, 1: 11}, {4: 20, 5: 21}, {1: 30, 0: 31}]
        assert [each.instance_id for each in asked[1].ids] == ["2", "2"]


def test_groups_for_which_no_prompt_waits_hold_back_their_source_and_are_kept() -> None:
    sender = Sends([group(number) for number in range(100)])
    with arriving(source(sender)) as flow:
        for number in range(100):
            (asked,) = flow.ask(request(str(number), 0, 1))

            assert rewards_of(asked) == {0: 10 * number, 1: 10 * number + 1}
            assert sender.sent - number < 64


def test_the_prompt_of_a_row_is_what_precedes_the_first_token_that_trains() -> None:
    with arriving([group(stop_reasons=[1, 0])]) as flow:
        (asked,) = flow.ask(request("7", 0, 1, prompt=""))
        rewards_of(asked)

    found = columns_of([Asked(asked, 0), Asked(asked, 1)], Rules(), filler=0)
    assert found["prompt_token_ids"] == [[1], [1]]
    assert found["response_ids"] == [[1, 1, 1]] * 2
    assert found["loss_masks"] == [[1, 0, 1]] * 2
    assert found["rollout_logprobs"] == [[-0.5, 0.0, -1.5]] * 2
    assert found["stop_reasons"] == ["length", "stop"]


def test_a_sequence_whose_advantage_its_sender_sets_to_zero_does_not_train() -> None:
    with arriving([group(meta={"overrides": [{}, {"set_advantage_to_zero": True}]})]) as flow:
        (asked,) = flow.ask(request("7", 0, 1))
        rewards_of(asked)

    assert [int(row.trajectory.loss_mask.sum()) for row in asked.rows.values() if row is not None] == [2, 0]


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (group(size=3), "a group of 3: expected generator.n_samples_per_prompt=2"),
        (group(advantages=[[0, 1, 0, 1]] * 2), "a group with advantages of its own, and SkyRL computes them"),
        (
            group(teacher_ids=[[[1]] * 4] * 2, teacher_logprobs=[[[-1.0]] * 4] * 2),
            "a group with candidates of a teacher, and SkyRL's loss reads none",
        ),
        (
            group(behavior_logprobs=None),
            "a group without log-probabilities: expected them, or generator.sampling_params.logprobs=null",
        ),
        (
            group(meta={"temperatures": [1.0, 0.5]}),
            "a group at temperature 0.5, 1.0: expected generator.sampling_params.temperature=1",
        ),
        (
            group(meta={"temperature": 0.7}),
            "a group at temperature 0.7: expected generator.sampling_params.temperature=1",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else None,
)
def test_a_group_that_skyrl_cannot_train_as_it_was_meant_is_refused_with_the_reason(
    refused: TrajectoryGroup, reason: str
) -> None:
    with capture_logs() as logs, arriving([refused, group(1)]) as flow:
        (asked,) = flow.ask(request("7", 0, 1))

        assert rewards_of(asked) == {0: 10, 1: 11}
    assert rejections(flow)[reason] == len(refused)
    assert reason in [each.get("reason") for each in logs]


def test_a_temperature_that_is_skyrls_own_is_no_reason_to_refuse() -> None:
    with arriving([group(1, meta={"temperatures": [1.0, [[3, 1.0], [1, 1.0]]]})]) as flow:
        (asked,) = flow.ask(request("7", 0, 1))

        assert rewards_of(asked) == {0: 10, 1: 11}


def test_log_probabilities_are_not_needed_where_skyrl_reads_none() -> None:
    with arriving([group(1, behavior_logprobs=None)], logprobs=False) as flow:
        (asked,) = flow.ask(request("7", 0, 1))

        assert rewards_of(asked) == {0: 10, 1: 11}


def test_groups_that_never_fit_end_the_flow_with_the_reason() -> None:
    with arriving([group(number, size=4) for number in range(99)]) as flow:
        (asked,) = flow.ask(request("7", 0, 1))

        with pytest.raises(StageFailed, match=r"got 64 trajectories in a row .* from test as a group of 4") as raised:
            rewards_of(asked)
        assert isinstance(raised.value.__cause__, RolloutsFailed)


def test_a_prompt_that_was_withdrawn_takes_no_group() -> None:
    with arriving([group(0), group(1)]) as flow:
        withdrawn, asked = request("0", 0, 1), request("1", 0, 1)

        def both() -> tuple[TrajectoryId, ...]:
            flow.requests.ask([withdrawn])
            return withdraw([withdrawn])

        assert flow.thread.call(both) == ()
        flow.ask(asked)

        assert rewards_of(asked) == {0: 0, 1: 1}
        assert withdrawn.rows == {}


def test_the_group_of_a_prompt_that_is_withdrawn_afterwards_is_told() -> None:
    with arriving([group(0), group(1)]) as flow:
        (withdrawn,) = flow.ask(request("0", 0, 1))
        rewards_of(withdrawn)

        assert [each.instance_id for each in flow.withdraw(withdrawn)] == ["0", "0"]
        (asked,) = flow.ask(request("1", 0, 1))
        assert rewards_of(asked) == {0: 10, 1: 11}


def test_when_the_flow_ends_its_groups_are_trained_and_nothing_waits_for_more() -> None:
    with arriving(source(Sends([group(1)], stays=False))) as flow:
        answered, starved = flow.ask(request("0", 0, 1), request("1", 0, 1))

        assert rewards_of(answered) == {0: 10, 1: 11}
        assert isinstance(starved.answered.exception(FAILSAFE_S), FlowEnded)
    assert flow.balance.balanced
