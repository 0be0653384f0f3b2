from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import reasoning_gym
from numpy.typing import NDArray
from tests.fake_policy import Letters, completion_of

from penstock import StopReason
from penstock._stages.sampling.environments import open_tasks
from penstock.environments import (
    Environment,
    EnvironmentFailed,
    OutsideEnvironment,
    RolloutResult,
    ScoredDataset,
    StepEnvironment,
)
from penstock.errors import InvalidPipeline
from penstock.policies import Completion, SamplingParams

Turns = Sequence[NDArray[np.int32] | Completion]


def text(turns: Turns) -> list[str]:
    return [Letters().decode((t.tokens if isinstance(t, Completion) else t).tolist()) for t in turns]


@dataclass
class Answers:
    """A policy that gives one answer after another, and then has no token left; a `RolloutSampler`."""

    left: list[str]
    sampling: SamplingParams
    deadline_s: float = math.inf
    most_tokens: int | None = None

    def params(self, _: int) -> SamplingParams:
        return self.sampling

    async def sample(self, _: NDArray[np.int32], params: SamplingParams) -> Completion | None:
        return completion_of(self.left.pop(0), params.max_completion_tokens) if self.left else None


def answering(*answers: str, max_completion_tokens: int = 99) -> Answers:
    return Answers(list(answers), SamplingParams(max_completion_tokens=max_completion_tokens))


async def rolled(
    make_env: Callable[[], Environment],
    *answers: str,
    task: int = 0,
    repetition: int = 0,
    max_completion_tokens: int = 99,
) -> RolloutResult:
    async with open_tasks(make_env, Letters(), threads=1, seed=100) as begin:
        return await (await begin(task))(repetition, answering(*answers, max_completion_tokens=max_completion_tokens))


class Sums:
    """A scored data set of three sums."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"question": f"{index}+1=", "answer": str(index + 1), "metadata": {}}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        return float(answer == entry["answer"])


@dataclass
class Countdown:
    """Shows the number of remaining turns; the reward of a turn is the number in the answer."""

    turns: int = 3
    cut: bool = False
    log: list[str] = field(default_factory=list)
    left: int = 0

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.log.append(f"reset {seed}")
        self.left = self.turns
        return f"{self.left} left", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        over = self.left == 0
        return f"{self.left} left", float(action), over and not self.cut, over and self.cut, {}

    def close(self) -> None:
        self.log.append("close")


class Recorded:
    """Brings rollouts that were sampled elsewhere."""

    def rollout(self, task: int, repetition: int) -> RolloutResult:
        return RolloutResult(turns=[np.array([task + 1], np.int32), completion_of("x" * (repetition + 1))], reward=0.5)


# -- scored data sets ----------------------------------------------------------------------------------------------


async def test_an_answer_is_scored_without_its_end_token() -> None:
    rollout = await rolled(Sums, "2", task=1)

    assert text(rollout.turns) == ["1+1=", "2\0"]
    assert (rollout.reward, rollout.stop_reason) == (1.0, StopReason.STOP)


async def test_a_cut_answer_is_scored_as_far_as_it_goes() -> None:
    rollout = await rolled(Sums, "22", task=1, max_completion_tokens=1)

    assert (rollout.reward, rollout.stop_reason) == (1.0, StopReason.LENGTH)


async def test_a_data_set_begins_again_behind_its_end() -> None:
    assert text((await rolled(Sums, "?", task=4)).turns)[0] == "1+1="


async def test_reasoning_gym_is_a_scored_data_set_as_it_is() -> None:
    def chain_sum() -> ScoredDataset:
        dataset: ScoredDataset = reasoning_gym.create_dataset("chain_sum", seed=1, size=3)
        return dataset

    answer = chain_sum()[0]["answer"]

    assert (await rolled(chain_sum, answer)).reward == 1.0
    assert (await rolled(chain_sum, "no idea")).reward == 0.0


# -- step-wise environments ----------------------------------------------------------------------------------------


async def test_an_episode_alternates_observations_and_answers_and_adds_up_its_rewards() -> None:
    rollout = await rolled(Countdown, "1", "2", "4")

    assert text(rollout.turns) == ["3 left", "1\0", "2 left", "2\0", "1 left", "4\0"]
    assert (rollout.reward, rollout.stop_reason) == (7.0, StopReason.STOP)
    assert rollout.turn_rewards == [1.0, 2.0, 4.0]


async def test_all_rollouts_of_a_prompt_begin_with_its_seed() -> None:
    env = Countdown(turns=1)

    async with open_tasks(lambda: env, Letters(), threads=1, seed=100) as begin:
        for number in (3, 4):
            rollout = await begin(number)
            await rollout(0, answering("1"))
            await rollout(1, answering("1"))

    assert env.log == ["reset 103", "reset 103", "reset 104", "reset 104", "close"]


async def test_an_episode_without_a_token_left_ends_with_its_last_answer() -> None:
    rollout = await rolled(Countdown, "1", "2")

    assert text(rollout.turns) == ["3 left", "1\0", "2 left", "2\0"]
    assert (rollout.reward, rollout.stop_reason) == (3.0, StopReason.LENGTH)


async def test_a_truncated_episode_ends_for_want_of_length() -> None:
    rollout = await rolled(lambda: Countdown(turns=1, cut=True), "1")

    assert rollout.stop_reason == StopReason.LENGTH


async def test_rollouts_at_once_have_an_environment_each_and_use_it_again() -> None:
    made: list[Countdown] = []

    def make() -> Countdown:
        made.append(Countdown(turns=1))
        return made[-1]

    async with open_tasks(make, Letters(), threads=1, seed=0) as begin:
        for _ in range(3):
            rollout = await begin(0)
            async with anyio.create_task_group() as rollouts:
                rollouts.start_soon(rollout, 0, answering("1"))
                rollouts.start_soon(rollout, 1, answering("1"))

    assert [env.log for env in made] == [["reset 0"] * 3 + ["close"]] * 2


async def test_an_environment_that_failed_is_closed_and_not_used_again() -> None:
    made: list[Countdown] = []

    def make() -> Countdown:
        made.append(Countdown(turns=1))
        return made[-1]

    async with open_tasks(make, Letters(), threads=1, seed=0) as begin:
        rollout = await begin(0)
        with pytest.raises(EnvironmentFailed, match="environment raised ValueError"):
            await rollout(0, answering("not a number"))
        await rollout(1, answering("1"))

    assert [env.log for env in made] == [["reset 0", "close"]] * 2


async def test_an_environment_that_hangs_is_closed_when_it_returns() -> None:
    stuck, release = anyio.Event(), threading.Event()

    class Hanging(Countdown):
        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            anyio.from_thread.run_sync(stuck.set, token=token)
            release.wait()
            self.log.append("returned")
            return super().step(action)

    env, token = Hanging(), anyio.lowlevel.current_token()
    async with open_tasks(lambda: env, Letters(), threads=1, seed=0) as begin:
        rollout = await begin(0)
        async with anyio.create_task_group() as rollouts:
            rollouts.start_soon(rollout, 0, answering("1"))
            await stuck.wait()
            rollouts.cancel_scope.cancel()
        assert env.log == ["reset 0"]
        release.set()

    assert env.log == ["reset 0", "returned", "close"]


async def test_coroutine_functions_run_on_the_event_loop() -> None:
    class Async:
        closed = False

        async def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
            await anyio.lowlevel.checkpoint()
            return f"seed {seed} in {threading.current_thread().name}", {}

        async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return "", float(action), True, False, {}

        async def close(self) -> None:
            Async.closed = True

    rollout = await rolled(Async, "3")

    assert text(rollout.turns) == ["seed 100 in MainThread", "3\0"]
    assert rollout.reward == 3.0
    assert Async.closed


# -- rollouts from outside -----------------------------------------------------------------------------------------


async def test_rollouts_from_outside_come_through_as_they_are() -> None:
    async with open_tasks(Recorded, None, threads=1, seed=0) as begin:
        rollout = await (await begin(4))(1, answering())

    assert text(rollout.turns) == ["\5", "xx\0"]
    assert isinstance(rollout.turns[0], np.ndarray)
    assert rollout.turns[0].dtype == np.int32
    assert rollout.reward == 0.5


def bad(**parts: Any) -> RolloutResult:
    return msgspec.structs.replace(
        RolloutResult(turns=[np.array([1], np.int32), completion_of("x")], reward=0.0), **parts
    )


def short(name: str) -> Completion:
    good = completion_of("xx")
    return msgspec.structs.replace(good, **{name: getattr(good, name)[:1]})


@pytest.mark.parametrize(
    ("rollout", "cause"),
    [
        ("words", "expected a RolloutResult, got str"),
        (bad(reward=float("nan")), "expected a finite number, got nan"),
        (bad(turns=[]), "expected a prompt of at least one token first"),
        (bad(turns=[completion_of("x")]), "expected a prompt of at least one token first"),
        (bad(turns=[np.array([-1])]), "expected a row of ids of 0 or more"),
        (bad(turns=[np.array([0.5])]), "expected a row of ids of 0 or more"),
        (bad(turns=[np.array([1]), short("logprobs")]), r"logprobs: expected 3 finite values, got shape \(1,\)"),
        (bad(turn_rewards=[1.0, 0.0]), "turn_rewards: expected 1, one for each Completion, got 2"),
        (bad(reward=5.0, turn_rewards=[99.0]), "turn_rewards: expected 5.0 in all, the reward, got 99.0"),
        (bad(turn_rewards=[float("inf")]), "expected a finite number, got inf"),
        (bad(turns=[np.array([1]), short("policy_versions")]), r"policy_versions: expected 3 finite values"),
    ],
)
async def test_a_rollout_from_outside_is_checked_before_it_is_believed(rollout: object, cause: str) -> None:
    class Outside:
        def rollout(self, task: int, repetition: int) -> object:  # noqa: ARG002 (the protocol's)
            return rollout

    with pytest.raises(EnvironmentFailed) as failed:
        await rolled(Outside)

    assert failed.match("environment raised (InvalidRecord|TypeError|ValueError)")
    assert re.search(cause, str(failed.value.__cause__))


# -- invalid environments ------------------------------------------------------------------------------------------


class Silent(Sums):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"question": ""}


class Numeric(Sums):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"question": index}


class Exits(Sums):
    def __getitem__(self, index: int) -> dict[str, Any]:
        raise SystemExit


class Unending(Sums):
    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:  # noqa: ARG002
        return float("inf")


@pytest.mark.parametrize(
    ("make_env", "reason"),
    [
        (Silent, "environment raised ValueError"),
        (Numeric, "environment raised TypeError"),
        (Exits, "environment raised SystemExit"),
        (Unending, "environment raised ValueError"),
    ],
)
async def test_any_exception_in_an_environment_is_an_environment_failure(
    make_env: Callable[[], Environment], reason: str
) -> None:
    with pytest.raises(EnvironmentFailed, match=reason):
        await rolled(make_env, "1")


async def test_another_object_than_an_environment_is_refused_with_the_methods_of_one() -> None:
    with pytest.raises(InvalidPipeline, match=r"a scored data set.*step-wise.*outside.*got dict"):
        await rolled(dict)  # type: ignore[arg-type]


async def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(InvalidPipeline, match="expected a tokenizer for it, got none"):
        async with open_tasks(Sums, None, threads=1, seed=0):
            pass


async def test_an_environment_that_cannot_be_made_raises_its_error() -> None:
    with pytest.raises(ZeroDivisionError):
        await rolled(lambda: 1 // 0)  # type: ignore[arg-type, return-value]


def test_the_kinds_are_distinguished_by_their_methods() -> None:
    assert isinstance(Sums(), ScoredDataset)
    assert isinstance(Countdown(), StepEnvironment)
    assert isinstance(Recorded(), OutsideEnvironment)
