from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import anyio
import msgspec
import numpy as np
import pytest
import structlog
from anyio.lowlevel import checkpoint
from numpy.typing import NDArray
from tests.fake_policy import FakePolicy, Letters, completion_of

from penstock import (
    AdvantageNormalizer,
    Context,
    GroupId,
    Schedule,
    SourceEnv,
    StopReason,
    TrajectoryGroup,
    TrajectoryId,
    Worker,
    current,
)
from penstock.channels import memory_channel
from penstock.environments import RolloutResult
from penstock.errors import InvalidConfig, InvalidRecord, LedgerImbalance
from penstock.policies import Completion, GenerationIsOutside, NoOpPolicy, SamplingParams
from penstock.testing import Driven, VirtualClock, drive, drive_source, entered
from penstock.training import ResumePoint


class Sums:
    """A scored data set without end."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"question": f"{index}+1=", "answer": str(index + 1)}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        return float(answer == entry["answer"])


class Game:
    """Two turns; repeats the answer, and rewards each "yes" with 1."""

    turns = 2

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.turn = 0
        return f"game {seed}?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        return f"<{action}>", float(action == "yes"), self.turn == self.turns, False, {}


def moody() -> Callable[[str], str]:
    """Answer "bad" to every third prompt and "fine" to the others."""
    answers = itertools.cycle(["fine", "fine", "bad"])
    return lambda _: next(answers)


class Touchy(Sums):
    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:  # noqa: ARG002 (the protocol's)
        if answer == "bad":
            raise ValueError("no score for that")
        return 1.0


class Broken(Sums):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 1:
            raise KeyError("question")
        return super().__getitem__(index)


class Ready:
    """Brings rollouts at once, on the event loop."""

    async def rollout(self, task: int, repetition: int) -> RolloutResult:  # noqa: ARG002 (the protocol's)
        return RolloutResult(turns=[np.array([1], np.int32), completion_of("x")], reward=1.0)


async def sampled(source: SourceEnv, worker: Worker | None = None, **options: Any) -> Driven[TrajectoryGroup]:
    with structlog.testing.capture_logs():
        return await drive_source(source, worker=worker, **options)


def source(make_env: Callable[[], Any] = Sums, policy: Any = None, **options: Any) -> SourceEnv:
    chosen: dict[str, Any] = {"group_size": 3, "groups": 1} | options
    return SourceEnv(make_env, policy or FakePolicy(), Letters(), **chosen)


# -- groups --------------------------------------------------------------------------------------------------------


async def test_a_group_holds_all_completions_of_one_prompt() -> None:
    (group,) = await sampled(source(policy=FakePolicy(answer=lambda _: "1")))

    assert (group.env, group.instance_id, group.rollout_ids.tolist()) == ("Sums", "0", [0, 1, 2])
    assert group.lengths().tolist() == [6, 6, 6]
    assert group.tokens.tolist() == Letters().encode("0+1=1\0") * 3
    assert group.loss_mask.tolist() == ([False] * 4 + [True] * 2) * 3
    assert group.behavior_logprobs is not None
    assert group.behavior_logprobs.tolist() == [0, 0, 0, 0, -1, -2] * 3
    assert group.rewards.tolist() == [1, 1, 1]
    assert group.policy_versions.tolist() == [7, 7, 7]
    assert group.stop_reasons.tolist() == [StopReason.STOP] * 3


async def test_in_several_turns_only_the_policys_tokens_train() -> None:
    (group,) = await sampled(source(Game, FakePolicy(answer=lambda _: "yes"), group_size=1, seed=40, first_task=2))

    sequence, completions = "game 42?yes\0<yes>yes\0", "........yes\0.....yes\0"
    assert Letters().decode(group.tokens.tolist()) == sequence
    assert group.loss_mask.tolist() == [letter != "." for letter in completions]
    assert group.behavior_logprobs is not None
    np.testing.assert_array_equal(group.behavior_logprobs != 0, group.loss_mask)
    assert group.rewards.tolist() == [2]


async def test_a_later_turn_is_prompted_with_all_earlier_turns() -> None:
    policy = FakePolicy(answer=lambda _: "yes")

    await sampled(source(Game, policy, group_size=1))

    assert policy.prompts == ["game 0?", "game 0?yes\0<yes>"]


async def test_a_version_a_sequence_where_weights_stood_still() -> None:
    (group,) = await sampled(source(Sums, FakePolicy(versions=[4, 5, 6])))

    assert group.policy_versions.tolist() == [4, 5, 6]


async def test_a_version_a_token_where_weights_changed_within_a_rollout() -> None:
    (group,) = await sampled(source(Game, FakePolicy(answer=lambda _: "ok", versions=[4, 5]), group_size=1))

    assert group.policy_versions.tolist() == [4] * 7 + [4] * 3 + [4] * 4 + [5] * 3


async def test_how_a_group_was_sampled_travels_with_it() -> None:
    (group,) = await sampled(
        source(Game, sampling=SamplingParams(max_completion_tokens=5, temperature=0.5), group_size=2)
    )

    assert group.meta == {"task": 0, "temperature": 0.5, "max_completion_tokens": 5}


async def test_the_policy_is_asked_for_no_more_than_the_allowance() -> None:
    policy = FakePolicy(answer=lambda _: "a long answer")

    sampling = SamplingParams(max_completion_tokens=5, temperature=0.5)

    (group,) = await sampled(source(policy=policy, sampling=sampling))

    assert policy.requests == [sampling] * 3
    assert group.completion_lengths().tolist() == [5, 5, 5]
    assert group.stop_reasons.tolist() == [StopReason.LENGTH] * 3


async def test_each_turn_has_its_own_parameters_and_the_last_are_those_of_all_later_turns() -> None:
    class Long(Game):
        turns = 3

    policy = FakePolicy(answer=lambda _: "no")
    first, later = SamplingParams(max_completion_tokens=9), SamplingParams(max_completion_tokens=3, top_k=2)

    (group,) = await sampled(source(Long, policy, group_size=1, sampling=(first, later)))

    assert policy.requests == [first, later, later]
    assert group.meta["max_completion_tokens"] == [9, 3]


async def test_a_group_records_the_temperature_of_each_turn_where_turns_differ() -> None:
    class Long(Game):
        turns = 3

    first, later = SamplingParams(temperature=0.7), SamplingParams(greedy=True)

    (group,) = await sampled(source(Long, FakePolicy(answer=lambda _: "no"), group_size=2, sampling=(first, later)))

    assert "temperature" not in group.meta
    for trajectory in range(2):
        (prompt, *turns) = group.meta["temperatures"][trajectory]
        assert [temperature for _, temperature in turns] == [0.7, 1, 1, 1, 1]
        assert prompt == (group[trajectory].prompt_length, 0.7)
        assert sum(tokens for tokens, _ in (prompt, *turns)) == group.lengths()[trajectory]


async def test_every_turn_of_every_rollout_has_a_seed_of_its_own_and_the_same_in_the_next_run() -> None:
    async def seeds() -> list[int]:
        policy = FakePolicy(answer=lambda _: "no")
        await sampled(source(Game, policy, group_size=2, groups=2, sampling=SamplingParams(seed=4)))
        return sorted(sampling.seed or 0 for sampling in policy.requests)

    first = await seeds()

    assert len(set(first)) == len(first) == 2 * 2 * 2
    assert await seeds() == first


async def test_groups_of_greedy_completions_are_scored_at_temperature_one() -> None:
    (group,) = await sampled(source(sampling=SamplingParams(greedy=True, temperature=0.3)))

    assert group.meta["temperature"] == 1


async def test_no_sequence_is_longer_than_max_length() -> None:
    policy = FakePolicy(answer=lambda _: "yes")

    sampling = SamplingParams(max_completion_tokens=8)

    (group,) = await sampled(source(Game, policy, group_size=1, sampling=sampling, max_length=13))

    assert policy.requests == [SamplingParams(max_completion_tokens=6)]
    assert group.lengths().tolist() == [11]
    assert group.stop_reasons.tolist() == [StopReason.LENGTH]


def test_a_pipeline_can_ask_how_large_a_group_may_be() -> None:
    assert source(max_length=13).stage_info().sends_at_most_tokens == 3 * 13
    assert source().stage_info().sends_at_most_tokens is None


async def test_a_prompt_that_leaves_no_room_to_answer_is_rejected() -> None:
    driven = await sampled(source(max_length=4))

    assert driven == []
    assert driven.ledger.balance().reasons["rejected"] == {"nothing was sampled": 3}


async def test_finished_rollouts_come_from_outside_where_the_policy_does_nothing() -> None:
    class Outside:
        def rollout(self, task: int, repetition: int) -> RolloutResult:
            return RolloutResult(
                turns=[np.array([task + 1], np.int32), completion_of("x", version=repetition)], reward=repetition
            )

    driven = await sampled(SourceEnv(Outside, NoOpPolicy(), group_size=2, groups=2))

    assert [group.rewards.tolist() for group in driven] == [[0, 1], [0, 1]]
    assert [group.policy_versions.tolist() for group in driven] == [[0, 1], [0, 1]]
    assert sorted(int(group.tokens[0]) for group in driven) == [1, 2]


async def test_behavior_logprobs_are_absent_where_the_engine_returns_none() -> None:
    class Outside:
        def rollout(self, task: int, repetition: int) -> RolloutResult:  # noqa: ARG002 (the protocol's)
            completion = completion_of("x")
            if repetition:
                completion = msgspec.structs.replace(completion, logprobs=None)
            return RolloutResult(turns=[np.array([1], np.int32), completion], reward=0.0)

    (group,) = await sampled(SourceEnv(Outside, NoOpPolicy(), group_size=2, groups=1))

    assert group.behavior_logprobs is None


# -- what turns earned ---------------------------------------------------------------------------------------------


class Doubling:
    """Three turns, which gain 1, 2 and 4 where "yes" is the answer."""

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:  # noqa: ARG002 (the protocol's)
        self.worth = 1
        return "?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        earned, self.worth = self.worth * float(action == "yes"), 2 * self.worth
        return "?", earned, self.worth > 4, False, {}


def playing(answers: Sequence[str], **options: Any) -> SourceEnv:
    """Return a source of rollouts of three turns, one after another, in which the policy answers `answers`."""
    left = iter(answers)
    return source(Doubling, FakePolicy(answer=lambda _: next(left)), concurrency=1, **options)


async def test_the_reward_of_each_turn_is_on_its_last_token_and_the_sum_is_the_reward() -> None:
    answers = ["yes", "no", "yes", "no", "no", "yes"]

    (group,) = await sampled(playing(answers, group_size=2, turn_rewards=True))

    assert Letters().decode(group.tokens.tolist()) == "?yes\0?no\0?yes\0" + "?no\0?no\0?yes\0"
    assert group.token_rewards is not None
    assert {int(at): group.token_rewards[at] for at in group.token_rewards.nonzero()[0]} == {4: 1, 13: 4, 26: 4}
    assert group.rewards.tolist() == [5, 4]


async def test_turn_rewards_become_discounted_advantages() -> None:
    """The reward of a turn is half of itself a token earlier; the environment's tokens are no steps."""
    (sampled_group,) = await sampled(playing(["yes", "no", "yes"], group_size=1, turn_rewards=True))
    valued = msgspec.structs.replace(sampled_group, values=np.zeros(len(sampled_group.tokens), np.float32))

    (out,) = await drive(AdvantageNormalizer("gae", rewards="token", gamma=0.5), [valued])

    expected = np.array([4 / 2**left for left in range(10, -1, -1)])
    expected[:4] += [1 / 8, 1 / 4, 1 / 2, 1]
    assert out.advantages is not None
    assert out.advantages[out.loss_mask].tolist() == expected.tolist()
    assert not out.advantages[~out.loss_mask].any()


async def test_without_turn_rewards_groups_contain_none() -> None:
    (group,) = await sampled(playing(["yes"] * 3, group_size=1))

    assert group.token_rewards is None
    assert group.rewards.tolist() == [7]


async def test_the_answer_to_a_question_is_a_turn() -> None:
    (group,) = await sampled(source(policy=FakePolicy(answer=lambda _: "1"), group_size=1, turn_rewards=True))

    assert group.token_rewards is not None
    assert group.token_rewards.tolist() == [0, 0, 0, 0, 0, 1]


Turn: TypeAlias = NDArray[np.int32] | Completion


class Silence:
    """Two external rollouts, in which some turns have no tokens."""

    def __init__(self, turn_rewards: Sequence[float] | None = (1.0, 2.0, 4.0)) -> None:
        self.turn_rewards = turn_rewards

    def rollout(self, task: int, repetition: int) -> RolloutResult:  # noqa: ARG002 (the protocol's)
        prompt, some = np.array([1], np.int32), completion_of("x")
        nothing = {name: getattr(some, name)[:0] for name in ("tokens", "logprobs", "policy_versions")}
        none = msgspec.structs.replace(some, **nothing)
        turns: list[list[Turn]] = [[prompt, none, some, none], [prompt, some, some, some]]
        return RolloutResult(turns=turns[repetition], reward=7.0, turn_rewards=self.turn_rewards)


async def test_the_reward_of_a_turn_without_tokens_stays_with_its_sequence() -> None:
    (group,) = await sampled(SourceEnv(Silence, NoOpPolicy(), group_size=2, groups=1, turn_rewards=True))

    assert group.token_rewards is not None
    assert group.token_rewards.tolist() == [0, 1, 6, 0, 0, 1, 0, 2, 0, 4]


async def test_requested_turn_rewards_that_are_missing_are_an_error() -> None:
    with pytest.raises(InvalidRecord, match=r"turn_rewards: expected a reward for each turn, .* got none"):
        await sampled(SourceEnv(partial(Silence, None), NoOpPolicy(), group_size=2, groups=1, turn_rewards=True))


# -- what fails ----------------------------------------------------------------------------------------------------


async def test_an_environment_that_raises_costs_that_rollout_and_the_group_goes_on_smaller() -> None:
    driven = await sampled(source(Touchy, FakePolicy(answer=moody()), groups=2, concurrency=3))

    assert [group.rollout_ids.tolist() for group in driven] == [[0, 1], [0, 1]]
    balance = driven.ledger.balance()
    assert (balance.admitted, balance.in_flight) == (6, 4)
    assert balance.reasons["failed"] == {"environment raised ValueError: no score for that": 2}


async def test_a_prompt_that_cannot_be_made_costs_its_group() -> None:
    driven = await sampled(source(Broken, groups=3))

    assert sorted(group.instance_id for group in driven) == ["0", "2"]
    assert driven.ledger.balance().reasons["failed"] == {"environment raised KeyError: 'question'": 3}


async def test_a_prompt_that_takes_too_long_costs_its_group() -> None:
    release = threading.Event()

    class Slow(Sums):
        def __getitem__(self, index: int) -> dict[str, Any]:
            release.wait()
            return super().__getitem__(index)

    driven = await sampled(source(Slow, rollout_timeout_s=0.05))

    release.set()
    assert driven == []
    assert driven.ledger.balance().reasons["failed"] == {"rollout took longer than 0.05 s": 3}


async def test_a_group_of_which_nothing_succeeded_is_not_sent() -> None:
    driven = await sampled(source(Touchy, FakePolicy(answer=lambda _: "bad"), groups=4))

    assert driven == []
    assert driven.ledger.balance().ended["failed"] == 12


def test_a_rollout_that_takes_too_long_is_counted_failed_and_the_others_go_on() -> None:
    clock = VirtualClock()

    class Hanging(Ready):
        async def rollout(self, task: int, repetition: int) -> RolloutResult:
            if repetition == 1:
                await anyio.sleep_forever()
            return await super().rollout(task, repetition)

    driven = clock.run(lambda: sampled(SourceEnv(Hanging, NoOpPolicy(), group_size=3, groups=1, rollout_timeout_s=30)))

    assert [group.rollout_ids.tolist() for group in driven] == [[0, 2]]
    assert driven.ledger.balance().reasons["failed"] == {"rollout took longer than 30 s": 1}
    assert clock.now_s == 30


async def test_scores_that_float32_would_make_equal_end_the_run_with_their_group() -> None:
    scores = itertools.count(2**24)

    class Timed(Sums):
        def score_answer(self, answer: str, entry: dict[str, Any]) -> float:  # noqa: ARG002 (the protocol's)
            return float(next(scores))

    with pytest.raises(InvalidRecord, match=r"rewards: expected differences .* from 16777216\.0 to 16777218\.0"):
        await sampled(source(Timed))


async def test_an_environment_that_blocks_for_ever_holds_up_neither_the_loop_nor_the_end() -> None:
    release = threading.Event()

    class Stuck(Sums):
        def score_answer(self, answer: str, entry: dict[str, Any]) -> float:  # noqa: ARG002 (the protocol's)
            release.wait()
            return 1.0

    driven = await sampled(source(Stuck, rollout_timeout_s=0.05, threads=1))

    release.set()
    assert driven.ledger.balance().reasons["failed"] == {"rollout took longer than 0.05 s": 3}


def test_a_run_that_is_cancelled_waits_for_its_environments_two_seconds_at_most() -> None:
    clock, stuck, release = VirtualClock(), threading.Event(), threading.Event()

    class Stuck(Game):
        def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
            stuck.set()
            release.wait()
            return super().reset(seed=seed)

    async def main() -> None:
        outbox, inbox = memory_channel[TrajectoryGroup](1)
        async with inbox, outbox, anyio.create_task_group() as tasks:
            tasks.start_soon(source(Stuck, rollout_timeout_s=3600).run, outbox)
            while not stuck.is_set():
                await checkpoint()
            tasks.cancel_scope.cancel()

    clock.run(main)

    release.set()
    assert clock.now_s == 2


async def test_a_name_that_was_trained_before_ends_the_run() -> None:
    context = Context()
    context.ledger.restore({GroupId("Ready", "0"): 0b1}, step=5)
    outbox, inbox = memory_channel[TrajectoryGroup](1)

    with entered(context):
        async with inbox, outbox:
            with pytest.raises(LedgerImbalance, match="expected ids that are never reused"):
                await SourceEnv(Ready, NoOpPolicy()).run(outbox)


async def test_an_error_of_the_policy_ends_the_run_as_it_is() -> None:
    def fail(_: str) -> str:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        await sampled(source(policy=FakePolicy(answer=fail), groups=None))


async def test_an_environment_that_waits_for_completions_fails_beside_a_policy_that_does_nothing() -> None:
    with pytest.raises(GenerationIsOutside):
        await sampled(source(policy=NoOpPolicy()))


async def test_logprobs_that_are_not_finite_end_the_run() -> None:
    class Nan(FakePolicy):
        async def generate(self, prompts: Any, sampling: Any) -> Any:
            completions = await super().generate(prompts, sampling)
            for completion in completions:
                completion.logprobs[:] = np.nan  # type: ignore[index]
            return completions

    with pytest.raises(InvalidRecord, match="behavior_logprobs"):
        await sampled(source(policy=Nan()))


# -- names ---------------------------------------------------------------------------------------------------------


async def test_a_resumed_run_goes_on_behind_the_prompts_it_has_used() -> None:
    driven = await sampled(source(groups=3, first_task=5))

    assert sorted(group.instance_id for group in driven) == ["5", "6", "7"]


async def test_a_run_that_goes_on_samples_what_was_not_trained_also_what_was_begun() -> None:
    trained = [GroupId("Sums", "0"), GroupId("Sums", "2"), GroupId("Sums", "9"), GroupId("else", "1")]

    resumed = source(groups=6).resume_from(ResumePoint(4, dict.fromkeys(trained, 0b1)))

    assert sorted(group.instance_id for group in await sampled(resumed)) == ["1", "3", "4", "5"]


async def test_in_a_synchronous_schedule_it_goes_on_behind_the_last_prompt_that_was_trained() -> None:
    trained = dict.fromkeys([GroupId("Sums", "0"), GroupId("Sums", "4"), GroupId("Sums", "3")], 0b1)
    resumed = source(groups=8).resume_from(ResumePoint(1, trained))

    groups = await sampled(resumed, schedule=Schedule(0, 3 * resumed.group_size))

    assert [group.instance_id for group in groups] == ["5", "6", "7"]


@pytest.mark.parametrize(
    ("make_env", "name", "expected"), [(Sums, "", "Sums"), (partial(Sums), "", "Sums"), (Sums, "sums", "sums")]
)
def test_an_environment_is_named_after_its_factory_or_by_an_option(
    make_env: Callable[[], Any], name: str, expected: str
) -> None:
    assert source(make_env, name=name).env_name == expected


async def test_the_policy_is_opened_for_the_worker_that_samples() -> None:
    policy = FakePolicy()

    await sampled(source(policy=policy), Worker(3, 4))

    assert policy.workers == [Worker(3, 4)]


# -- pace ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("group_size", "concurrency"), [(2, 4), (5, 2), (3, 3)])
async def test_no_more_rollouts_run_at_once_than_allowed(group_size: int, concurrency: int) -> None:
    now, most = 0, 0

    class Counting(Ready):
        async def rollout(self, task: int, repetition: int) -> RolloutResult:
            nonlocal now, most
            now += 1
            most = max(most, now)
            for _ in range(20):
                await checkpoint()
            now -= 1
            return await super().rollout(task, repetition)

    await sampled(SourceEnv(Counting, NoOpPolicy(), group_size=group_size, groups=6, concurrency=concurrency))

    assert most == concurrency


async def reached(condition: Callable[[], bool]) -> None:
    """Let all tasks run until `condition` holds, and then until they are blocked."""
    while not condition():
        await checkpoint()
    for _ in range(50):
        await checkpoint()


async def test_without_credit_no_more_is_sampled_than_is_allowed_at_once() -> None:
    context = Context()
    outbox, inbox = memory_channel[TrajectoryGroup](1)
    stage = SourceEnv(Ready, NoOpPolicy(), group_size=3, concurrency=9)

    async with inbox, outbox, anyio.create_task_group() as tasks:
        with entered(context):
            tasks.start_soon(stage.run, outbox)
        await reached(lambda: context.ledger.in_flight >= 4 * 3)
        tasks.cancel_scope.cancel()

    balance = context.ledger.balance()
    assert (balance.admitted, balance.in_flight) == (12, 12)  # one group in the channel, three wait for credit


async def test_in_a_synchronous_schedule_groups_come_in_waves_and_in_order() -> None:
    asked = list[int]()

    class Uneven(Sums):
        def __getitem__(self, index: int) -> dict[str, Any]:
            asked.append(index)
            return {"question": "?" * (9 - index), "answer": ""}

    class Patient(FakePolicy):
        """Receives all requests before it answers them, the last first."""

        async def generate(self, prompts: Any, sampling: Any) -> Any:
            assert len(asked) % 3 == 0
            for _ in range(len(prompts[0])):
                await checkpoint()
            return await super().generate(prompts, sampling)

    stage = source(Uneven, Patient(), groups=6)
    context = Context(schedule=Schedule(0, 3 * stage.group_size))
    outbox, inbox = memory_channel[TrajectoryGroup](9)
    waves = list[list[TrajectoryGroup]]()

    async with inbox, outbox, anyio.create_task_group() as tasks:
        with entered(context):
            tasks.start_soon(stage.run, outbox)
        waves.append([await inbox.receive() for _ in range(3)])
        assert len(asked) == 3
        for group in waves[0]:
            context.ledger.commit_ids(group.ids, 1)
        waves.append([await inbox.receive() for _ in range(3)])

    assert [group.instance_id for wave in waves for group in wave] == ["0", "1", "2", "3", "4", "5"]


@dataclass
class LateWeights(FakePolicy):
    """Version 3 is published when it is opened, and arrives later."""

    arriving: list[int] = field(default_factory=list)

    @asynccontextmanager
    async def open(self, worker: Worker) -> AsyncGenerator[LateWeights]:
        current().ledger.note_published(3)
        async with super().open(worker):
            yield self

    async def arrived(self, version: int) -> None:
        assert not self.prompts or self.arriving
        self.arriving.append(version)


@pytest.mark.parametrize("schedule", [Schedule(1), Schedule(0, 1)])
async def test_a_group_with_bounded_lag_is_begun_when_the_published_weights_have_arrived(schedule: Schedule) -> None:
    policy = LateWeights()

    await sampled(source(policy=policy, groups=1), schedule=schedule)

    assert policy.arriving == [3]


async def test_a_group_without_a_bound_on_its_lag_does_not_wait_for_weights() -> None:
    policy = LateWeights()

    await sampled(source(policy=policy))

    assert policy.arriving == []


async def test_max_lag_holds_back_what_would_be_trained_too_late() -> None:
    context, lags = Context(schedule=Schedule(1)), list[int]()
    context.ledger.admit(GroupId("earlier", "0"), range(3))
    context.ledger.commit_ids([TrajectoryId("earlier", "0", each) for each in range(3)], 1)  # so a step trains 3
    outbox, inbox = memory_channel[TrajectoryGroup](100)
    stage = SourceEnv(Ready, NoOpPolicy(), group_size=3, concurrency=300)

    async with inbox, outbox, anyio.create_task_group() as tasks:
        with entered(context):
            tasks.start_soon(stage.run, outbox)
        for step in range(2, 10):
            await reached(lambda: context.ledger.in_flight >= 6)
            lags.append(context.ledger.in_flight // 3 - 1)
            group = await inbox.receive()
            context.ledger.commit_ids(group.ids, step)
        tasks.cancel_scope.cancel()

    assert lags == [1] * 8


# -- beside the records --------------------------------------------------------------------------------------------


async def test_a_source_reports_metrics_of_its_rollouts() -> None:
    driven = await sampled(
        source(Game, FakePolicy(answer=lambda _: "yes"), groups=2, sampling=SamplingParams(max_completion_tokens=3))
    )

    metrics = driven.metrics.emit(0)
    assert metrics["rollout/trajectories"] == 6
    assert metrics["rollout/reward"] == 2.0
    assert metrics["rollout/response_length"] == 6
    assert metrics["rollout/prompt_length"] == 7
    assert metrics["rollout/turns"] == 2
    assert metrics["rollout/cut_ratio"] == 1
    assert metrics["timing_s/rollout"] >= 0


async def test_failures_are_counted_and_logged_with_their_causes() -> None:
    with structlog.testing.capture_logs() as events:
        driven = await drive_source(source(Touchy, FakePolicy(answer=moody())))

    assert driven.metrics.emit(0)["dropped/failed"] == 1
    (event,) = [event for event in events if event["event"] == "rollout_dropped"]
    assert (event["env"], event["instance_id"], event["rollouts"]) == ("Touchy", "0", 1)
    assert (event["state"], event["reason"]) == ("failed", "environment raised ValueError: no score for that")
    assert str(event["exc_info"]) == "no score for that"


def test_a_source_travels_to_workers() -> None:
    stage = SourceEnv(Sums, NoOpPolicy(), Letters(), group_size=3)

    assert pickle.loads(pickle.dumps(stage)) == stage  # noqa: S301 (our own bytes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 0}, "SourceEnv.group_size: expected a whole number of at least 1, got 0"),
        ({"sampling": ()}, r"SourceEnv.sampling: expected SamplingParams or a tuple of them, got \(\)"),
        ({"sampling": {"top_p": 0.9}}, "SourceEnv.sampling: expected SamplingParams or a tuple of them, got {'top_p'"),
        ({"concurrency": 0}, "SourceEnv.concurrency: expected a whole number of at least 1, got 0"),
        ({"threads": 0}, "SourceEnv.threads: expected a whole number of at least 1, got 0"),
        ({"rollout_timeout_s": -1}, "SourceEnv.rollout_timeout_s: expected a finite number above 0, got -1"),
    ],
)
def test_options_that_could_never_sample_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        source(**options)
