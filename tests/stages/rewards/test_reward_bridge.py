from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.stages.answers import Characters, answering, drive_text
from tests.stages.holding import lets_go_of_what_it_sent

from penstock import Context, RewardBridge, TrajectoryGroup
from penstock.channels import memory_channel
from penstock.errors import InvalidConfig, InvalidRecord, RewardFunctionFailed
from penstock.rewards import RewardFunction, RewardInput
from penstock.testing import VirtualClock, drive, entered, group

fewer = settings(max_examples=50)


def bridge(*functions: RewardFunction, **config: Any) -> RewardBridge:
    return RewardBridge.from_config(config, functions=functions)


def parts(shaped: TrajectoryGroup) -> dict[str, list[float]]:
    return {name: [round(x, 6) for x in part.tolist()] for name, part in shaped.reward_parts.items()}


MARK = {"marker": "<a>", "reward": 0.5}


# -- configuration ---------------------------------------------------------------------------------------------------


async def test_with_nothing_configured_groups_pass_as_they_are() -> None:
    given = [group(), group(instance_id="1")]

    out = await drive_text(RewardBridge(), given)

    assert out[0] is given[0]
    assert out[1] is given[1]


def test_a_yaml_file_without_code_shapes_the_reward(tmp_path: Path) -> None:
    path = tmp_path / "reward.yaml"
    path.write_text(
        """
        format_markers:
          - {marker: <think>, closing: </think>, reward: 0.1}
          - {marker: <answer>, closing: </answer>, reward: 0.2, counted: once}
        ordered: true
        length_bounty: {reward: -1e-2, unit: character, cap: 0.05}
        combine: add
        clip: [-1, 1.2]
        """
    )

    stage = RewardBridge.from_yaml(path)
    (out,) = anyio.run(drive_text, stage, [answering("<think>2+2</think><answer>4</answer>", "4", rewards=[1, 1])])

    assert parts(out) == {
        "score": [1, 1],
        "format_markers": [0.3, 0],
        "length_bounty": [-0.05, -0.01],
        "clip": [-0.05, 0],
    }
    assert out.rewards.tolist() == pytest.approx([1.2, 0.99])


def test_a_mistake_in_the_file_is_reported_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "reward.yaml"
    path.write_text("format_markers:\n- {marker: a, reward: 1}\n- {marker: b, reward: much}\n")

    with pytest.raises(
        InvalidConfig, match=r"Expected `float`, got `str` - at `\$\.format_markers\[1\]\.reward` \(in .*yaml"
    ):
        RewardBridge.from_yaml(path)


async def test_text_without_a_tokenizer_is_refused_at_once() -> None:
    by_character = {"length_bounty": {"reward": 1, "cap": 1, "unit": "character"}}
    for stage in (bridge(format_markers=[MARK]), bridge(**by_character), bridge(RewardFunction(length))):
        with pytest.raises(InvalidConfig, match="tokenizer: expected one"):
            await drive(stage, [answering("a")])


def test_components_of_one_name_are_refused() -> None:
    for functions in ([RewardFunction(length), RewardFunction(length)], [RewardFunction(length, name="score")]):
        with pytest.raises(ValueError, match="functions: expected names that differ from each other"):
            bridge(*functions)


def test_a_bridge_can_be_sent_to_its_process() -> None:
    stage = bridge(RewardFunction(length), format_markers=[MARK])

    assert pickle.loads(pickle.dumps(stage)).config == stage.config  # noqa: S301 (our own bytes)


# -- only the policy's tokens -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "rewards"),
    [
        (answering("no", "<a>", prompt="Say <a>!"), [0, 0.5]),
        (answering(["go", "<a>", "on"], ["go", "", "<a>"]), [0, 0.5]),
        (answering(["<", "x", "a>"]), [0]),
    ],
    ids=["in the prompt", "in an observation", "around an observation"],
)
async def test_a_marker_outside_the_policys_tokens_pays_nothing(given: TrajectoryGroup, rewards: list[float]) -> None:
    (out,) = await drive_text(bridge(format_markers=[MARK]), [given])

    assert out.rewards.tolist() == rewards


async def test_only_sampled_tokens_are_decoded_and_no_end_of_sequence() -> None:
    tokenizer = Characters()

    given = [answering(["one\0", "two", "three\0"], "", prompt="zero")]
    await drive(bridge(format_markers=[MARK]), given, tokenizer=tokenizer)

    assert tokenizer.decoded == ["one", "three"]


async def test_nothing_is_decoded_where_nothing_reads_text() -> None:
    tokenizer = Characters()
    stage = bridge(
        RewardFunction(lambda answer: len(answer.text), name="blind", reads_text=False),
        length_bounty={"reward": 0.1, "cap": 1},
        clip=[-1, 1],
    )

    (out,) = await drive(stage, [answering("abc")], tokenizer=tokenizer)

    assert tokenizer.decoded == []
    assert parts(out)["blind"] == [0]


async def test_a_large_group_is_decoded_off_the_event_loop() -> None:
    where: list[str] = []

    class Watched(Characters):
        def decode(self, ids: Sequence[int], /) -> str:
            where.append(threading.current_thread().name)
            return super().decode(ids)

    given = [answering("<a>" * 2000), answering("<a>", instance_id="1")]
    await drive(bridge(format_markers=[MARK]), given, tokenizer=Watched())

    assert where[0] != threading.main_thread().name
    assert where[1] == threading.main_thread().name


TEXT = st.text(st.sampled_from("<a/>b"), max_size=12)


@fewer
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4), TEXT)
def test_the_prompt_and_observations_never_change_a_reward(turns: list[tuple[str, str]], noise: str) -> None:
    config = {
        "format_markers": [MARK | {"counted": "each"}, {"marker": "b", "reward": 1, "closing": "/"}],
        "length_bounty": {"reward": 0.1, "cap": 3, "unit": "character"},
    }
    plain = answering(*([first, ".", second] for first, second in turns), prompt=".")
    noisy = answering(*([first, noise + ".", second] for first, second in turns), prompt=noise + ".")

    one, other = (anyio.run(drive_text, bridge(**config), [g])[0] for g in (plain, noisy))

    assert one.rewards.tolist() == other.rewards.tolist()


# -- parts -----------------------------------------------------------------------------------------------------------


scores = st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=5)


@fewer
@given(scores, st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_parts_always_sum_to_the_reward(
    scores: list[float],
    marked: bool,  # noqa: FBT001
    bounty: bool,  # noqa: FBT001
    fallback: bool,  # noqa: FBT001
    clipped: bool,  # noqa: FBT001
) -> None:
    config: dict[str, Any] = {"combine": "fallback" if fallback else "add"}
    config |= {"format_markers": [MARK]} if marked else {}
    config |= {"length_bounty": {"reward": 0.3, "cap": 1}} if bounty else {}
    config |= {"clip": [-1, 1]} if clipped else {}

    given = answering(*("<a>" if i % 2 else "no" for i in range(len(scores))), rewards=scores)
    (out,) = anyio.run(drive_text, bridge(**config), [given])

    if config != {"combine": "add"}:
        assert np.sum(list(out.reward_parts.values()), axis=0) == pytest.approx(out.rewards, abs=1e-5)
        assert out.reward_parts["score"].tolist() == given.rewards.tolist()
    else:
        assert out is given


async def test_a_second_bridge_adds_to_the_parts_of_the_first() -> None:
    first = bridge(format_markers=[MARK])
    second = bridge(format_markers=[MARK], length_bounty={"reward": 0.1, "cap": 1})

    (between,) = await drive_text(first, [answering("<a>", rewards=[1])])
    (out,) = await drive_text(second, [between])

    assert parts(out) == {"score": [1], "format_markers": [1], "length_bounty": [0.3]}
    assert out.rewards.tolist() == pytest.approx([2.3])


async def test_groups_that_come_together_are_treated_as_if_each_had_come_alone() -> None:
    given = [
        group(completion_lengths=lengths, rewards=[0.1 * n for n in lengths], instance_id=str(i))
        for i, lengths in enumerate([[1, 3], [0], [9], [2, 5, 1]])
    ]
    (given[3],) = await drive_text(bridge(clip=[0.15, 10]), [given[3]])  # brings parts of its own
    stage = bridge(length_bounty={"reward": 0.07, "cap": 0.5}, combine="fallback", right_from=0.3, clip=[-1, 0.8])

    out = await drive_text(stage, given)

    assert [one.id for one in out] == [one.id for one in given]
    for shaped, one in zip(out, given, strict=True):
        (alone,) = await drive_text(stage, [one])
        assert shaped.rewards.tobytes() == alone.rewards.tobytes()
        assert list(shaped.reward_parts) == list(alone.reward_parts)
        assert [p.tobytes() for p in shaped.reward_parts.values()] == [p.tobytes() for p in alone.reward_parts.values()]


@pytest.mark.parametrize("config", [{}, {"clip": [-1, 1]}, {"format_markers": [MARK]}])
async def test_sent_records_are_not_held_while_the_stage_waits_for_the_next(config: dict[str, Any]) -> None:
    await lets_go_of_what_it_sent(bridge(**config), [answering("<a>", instance_id=str(i)) for i in range(4)])


async def test_everything_else_of_a_group_stays_as_it_is() -> None:
    given = answering("<a>", "no")

    (out,) = await drive_text(bridge(format_markers=[MARK]), [given])

    assert out.tokens is given.tokens
    assert out.loss_mask is given.loss_mask
    assert out.ids == given.ids


async def test_a_group_of_empty_sequences_passes() -> None:
    empty = TrajectoryGroup.build(env="e", instance_id="0", sequences=[[]], loss_mask=[[]], rewards=[0.0])

    for stage in (bridge(format_markers=[MARK]), bridge(RewardFunction(length))):
        (out,) = await drive_text(stage, [empty])
        assert out.completion_lengths().tolist() == [0]


# -- functions -------------------------------------------------------------------------------------------------------


def length(answer: RewardInput) -> float:
    """Return the length of the answer; a plain function runs in a thread."""
    return float(len(answer.text))


async def test_a_plain_function_runs_in_a_thread() -> None:
    names: list[str] = []

    def where(_answer: RewardInput) -> float:
        names.append(threading.current_thread().name)
        return 0.25

    (out,) = await drive_text(bridge(RewardFunction(where)), [answering("abc", rewards=[1])])

    assert names != [threading.main_thread().name]
    assert parts(out) == {"score": [1], "where": [0.25]}


async def test_an_async_function_runs_on_the_event_loop() -> None:
    names: list[str] = []

    async def where(_answer: RewardInput) -> float:
        await anyio.lowlevel.checkpoint()
        names.append(threading.current_thread().name)
        return 0.25

    class Judge:
        __name__ = "judge"

        async def __call__(self, answer: RewardInput) -> float:
            return await where(answer)

    (out,) = await drive_text(bridge(RewardFunction(where), RewardFunction(Judge())), [answering("abc", rewards=[1])])

    assert names == [threading.main_thread().name] * 2
    assert out.rewards.tolist() == [1.5]


async def test_a_function_sees_text_score_trajectory_and_meta() -> None:
    seen: list[RewardInput] = []

    async def look(answer: RewardInput) -> float:
        seen.append(answer)
        return 0.0

    given = answering(["one", "?", "two"], rewards=[0.5], prompt="Question")
    await drive_text(bridge(RewardFunction(look)), [given])

    assert seen[0].text == "one\ntwo"
    assert seen[0].score == 0.5
    assert seen[0].trajectory.id == given.ids[0]
    assert seen[0].trajectory.tokens.tolist() == given.tokens.tolist()
    assert seen[0].meta == {}


async def test_no_more_calls_run_at_a_time_than_were_allowed() -> None:
    running, most = 0, 0

    async def count(_answer: RewardInput) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await anyio.lowlevel.checkpoint()
        running -= 1
        return 0.0

    await drive_text(
        bridge(RewardFunction(count, concurrency=3)), [answering(*"abcdefgh", instance_id=str(i)) for i in range(3)]
    )

    assert most == 3


async def test_several_groups_are_judged_at_a_time_and_leave_in_order() -> None:
    last_began = anyio.Event()

    async def first_waits_for_last(answer: RewardInput) -> float:
        if answer.text == "last":
            last_began.set()
        elif answer.text == "first":
            await last_began.wait()
        return 0.0

    given = [answering(text, instance_id=text) for text in ("first", "middle", "last")]
    out = await drive_text(bridge(RewardFunction(first_waits_for_last)), given)

    assert [g.instance_id for g in out] == ["first", "middle", "last"]


async def test_groups_are_taken_in_only_while_there_is_room_for_calls() -> None:
    feed, inbox = memory_channel[TrajectoryGroup](10)
    outbox, shaped = memory_channel[TrajectoryGroup](10)

    async def never(_answer: RewardInput) -> float:
        await anyio.sleep_forever()
        return 0.0

    async with feed, inbox, outbox, shaped, anyio.create_task_group() as tasks:
        with entered(Context(tokenizer=Characters())):
            tasks.start_soon(bridge(RewardFunction(never, concurrency=4)).run, inbox, outbox)
            for i in range(5):
                await feed.send(answering("a", "b", instance_id=str(i)))
            await anyio.wait_all_tasks_blocked()
            assert feed.statistics().items == 3  # 2 groups of 2 fill the 4 calls
            tasks.cancel_scope.cancel()


async def test_groups_that_functions_judge_are_held_as_copies() -> None:
    feed, inbox = memory_channel[TrajectoryGroup](1)
    outbox, shaped = memory_channel[TrajectoryGroup](1)
    began, go = anyio.Event(), anyio.Event()

    async def wait(_answer: RewardInput) -> float:
        began.set()
        await go.wait()
        return 0.0

    given = answering("abc")
    expected = given.tokens.tolist()
    async with feed, inbox, outbox, shaped, anyio.create_task_group() as tasks:
        with entered(Context(tokenizer=Characters())):
            tasks.start_soon(bridge(RewardFunction(wait)).run, inbox, outbox)
            await feed.send(given)
            await began.wait()
            given.tokens.flags.writeable = True
            given.tokens[:] = 0  # the producer reuses the slot
            go.set()
            assert (await shaped.receive()).tokens.tolist() == expected
            tasks.cancel_scope.cancel()


async def test_a_fallback_asks_functions_about_failed_answers_only() -> None:
    asked: list[str] = []

    async def ask(answer: RewardInput) -> float:
        asked.append(answer.text)
        return 5.0

    (out,) = await drive_text(
        bridge(RewardFunction(ask), combine="fallback"), [answering("right", "wrong", rewards=[1, 0])]
    )

    assert asked == ["wrong"]
    assert out.rewards.tolist() == [1, 1]
    assert parts(out) == {"score": [1, 0], "ask": [0, 5], "fallback": [0, -4]}


# -- functions that fail ---------------------------------------------------------------------------------------------


async def fragile(answer: RewardInput) -> float:
    if answer.text == "raise":
        raise KeyError(answer.text)
    if answer.text == "hang":
        await anyio.sleep_forever()
    return math.nan if answer.text == "nan" else 0.5


async def test_rewards_that_float32_would_make_equal_end_the_run_with_their_group() -> None:
    nanoseconds = {"first": 2e9, "second": 2e9 + 100}
    timed = RewardFunction(lambda answer: nanoseconds[answer.text], name="timed")

    with pytest.raises(InvalidRecord, match=r"test/0: rewards: expected differences .* from 2000000000\.0 to"):
        await drive_text(bridge(timed), [answering("first", "second", rewards=[0, 0])])


def test_a_failure_costs_the_trajectory_and_is_accounted_with_its_reason() -> None:
    given = [answering("fine", "raise", "nan", "hang", "good", rewards=[1, 2, 3, 4, 5])]

    out = VirtualClock().run(lambda: drive_text(bridge(RewardFunction(fragile)), given))

    assert out[0].rollout_ids.tolist() == [0, 4]
    assert out[0].rewards.tolist() == [1.5, 5.5]
    balance = out.ledger.balance()
    assert balance.ended["failed"] == 3
    assert balance.reasons["failed"] == {
        "fragile: KeyError: 'raise'": 1,
        "fragile: ValueError: expected a finite number, got nan": 1,
        "fragile: TimeoutError: expected a value within 30.0 s, got none": 1,
    }
    assert balance.in_flight == 2
    metrics = out.metrics.emit(0)
    assert metrics["rewards/fragile/failed"] == 3
    assert metrics["dropped/failed"] == 3


async def test_a_group_of_which_nothing_is_left_is_not_sent() -> None:
    out = await drive_text(
        bridge(RewardFunction(fragile)), [answering("raise", "nan"), answering("fine", instance_id="1")]
    )

    assert [g.instance_id for g in out] == ["1"]
    assert out.ledger.balance().ended["failed"] == 2


async def test_a_failure_can_count_as_a_value_and_is_still_counted() -> None:
    out = await drive_text(bridge(RewardFunction(fragile, on_failure=-1.0)), [answering("fine", "raise")])

    assert out[0].rewards.tolist() == [0.5, -1]
    assert out.ledger.balance().ended["failed"] == 0
    assert out.metrics.emit(0)["rewards/fragile/failed"] == 1


@pytest.mark.parametrize("on_failure", ["drop", 0.0])
async def test_a_function_that_fails_64_times_in_a_row_ends_the_pipeline(on_failure: Literal["drop"] | float) -> None:
    groups = [answering(*["raise"] * 8, instance_id=str(number)) for number in range(9)]

    with pytest.raises(
        RewardFunctionFailed, match=r"64 completions in a row.*the last one KeyError: 'raise'"
    ) as raised:
        await drive_text(bridge(RewardFunction(fragile, on_failure=on_failure)), groups)

    assert isinstance(raised.value.__cause__, KeyError)


async def test_one_success_ends_a_row_of_failures_of_a_function() -> None:
    groups = [answering(*["raise"] * 7, "fine", instance_id=str(number)) for number in range(20)]

    out = await drive_text(bridge(RewardFunction(fragile)), groups)

    assert out.ledger.balance().ended["failed"] == 140


async def test_a_failure_can_end_the_pipeline() -> None:
    with pytest.raises(KeyError, match="raise"):
        await drive_text(bridge(RewardFunction(fragile, on_failure="raise")), [answering("fine", "raise")])


def test_a_timeout_that_ends_the_pipeline_names_function_and_bound() -> None:
    stage = bridge(RewardFunction(fragile, reward_timeout_s=7, on_failure="raise"))

    with pytest.raises(TimeoutError, match="fragile: expected a value within 7 s, got none"):
        VirtualClock().run(lambda: drive_text(stage, [answering("hang")]))


def test_waiting_for_a_turn_is_not_held_against_a_call() -> None:
    async def slow(_answer: RewardInput) -> float:
        await anyio.sleep(20)
        return 1.0

    clock = VirtualClock()
    out = clock.run(
        lambda: drive_text(bridge(RewardFunction(slow, concurrency=1, reward_timeout_s=30)), [answering(*"abcd")])
    )

    assert out[0].rewards.tolist() == [1, 1, 1, 1]
    assert clock.now_s == pytest.approx(80)


async def test_a_plain_function_that_hangs_is_left_behind_and_accounted() -> None:
    done = threading.Event()

    def hang(_answer: RewardInput) -> float:
        done.wait()
        return 0.0

    stage = bridge(RewardFunction(hang, reward_timeout_s=0.01, concurrency=1))
    try:
        out = await drive_text(stage, [answering("a", "b")])
    finally:
        done.set()

    assert out == []
    assert out.ledger.balance().reasons["failed"] == {"hang: TimeoutError: expected a value within 0.01 s, got none": 2}


async def test_a_trajectory_that_several_functions_fail_is_dropped_once() -> None:
    stage = bridge(RewardFunction(fragile), RewardFunction(fragile, name="again"))

    out = await drive_text(stage, [answering("raise", "fine")])

    assert out.ledger.balance().reasons["failed"] == {"fragile: KeyError: 'raise'": 1}
    assert out[0].rewards.tolist() == [1.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"function": lambda _: 0.0}, "name: expected one"),
        ({"function": length, "concurrency": 0}, "concurrency: expected a whole number of at least 1, got 0"),
        ({"function": length, "reward_timeout_s": 0}, "reward_timeout_s: expected a finite number above 0"),
        ({"function": length, "reward_timeout_s": math.nan}, "reward_timeout_s: expected a finite number above 0"),
        ({"function": length, "on_failure": "ignore"}, "on_failure: expected 'drop', 'raise' or a finite number"),
        ({"function": length, "on_failure": math.nan}, "on_failure: expected 'drop', 'raise' or a finite number"),
    ],
)
def test_a_function_that_makes_no_sense_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardFunction(**arguments)
