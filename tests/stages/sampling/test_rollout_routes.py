"""The column `routed_experts` of rollouts of one turn, of several, and of branches."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.fake_policy import Letters, completion_of

from penstock import SourceEnv, TrajectoryGroup, Worker
from penstock.environments import Branch, RolloutResult
from penstock.errors import InvalidRecord
from penstock.policies import Completion, NoOpEngine, NoOpPolicy, SamplingParams
from penstock.testing import drive_source


def recorded(tokens: int, call: int) -> NDArray[np.uint8]:
    """Return [tokens, 1, 2] experts that tell the call and the place; the last has none, as it was not read."""
    experts = np.stack([np.full(tokens, 100 + call), np.arange(tokens)], axis=-1)[:, None].astype(np.uint8)
    experts[-1:] = 0
    return experts


@dataclass
class Recording(NoOpEngine):
    """Answers "ab", and records experts."""

    routed_experts: bool = True
    calls: int = 0

    @asynccontextmanager
    async def open(self, worker: Worker) -> AsyncGenerator[Recording]:  # noqa: ARG002 (the protocol's)
        yield self

    async def generate(self, prompts: Sequence[NDArray[np.int32]], sampling: SamplingParams) -> list[Completion]:  # noqa: ARG002 (the protocol's)
        found = [completion_of("ab")] * len(prompts)
        self.calls += 1
        return [
            msgspec.structs.replace(each, routed_experts=recorded(len(prompt) + len(each.tokens), self.calls))
            for each, prompt in zip(found, prompts, strict=True)
        ]


class Game:
    """Two turns, with "<>" between them."""

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:  # noqa: ARG002 (the protocol's)
        self.turn = 0
        return "go", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:  # noqa: ARG002 (the protocol's)
        self.turn += 1
        return "<>", 1.0, self.turn == 2, False, {}


@dataclass
class Given:
    """Brings one rollout."""

    result: RolloutResult

    def rollout(self, task: int, repetition: int) -> RolloutResult:  # noqa: ARG002 (the protocol's)
        return self.result


async def sampled(make_env: Any, policy: Any) -> TrajectoryGroup:
    source = SourceEnv(make_env, policy, Letters(), group_size=1, groups=1)
    (group,) = await drive_source(source)
    return group


def calls_of(group: TrajectoryGroup) -> str:
    """Return the call that recorded each token, "." where none did."""
    assert group.routed_experts is not None
    return "".join("." if not first else str(first - 100) for first, _ in group.routed_experts[:, 0].tolist())


def turn(text: str, read: int, call: int) -> Completion:
    """Return a completion and the end token after a prompt of `read` tokens."""
    completion = completion_of(text)
    return msgspec.structs.replace(completion, routed_experts=recorded(read + len(completion.tokens), call))


async def test_each_token_has_the_experts_of_the_first_turn_that_read_it() -> None:
    group = await sampled(Game, Recording())

    assert Letters().decode(group.tokens.tolist()) == "goab\0<>ab\0"
    assert calls_of(group) == "111122222."
    assert group.routed_experts is not None
    assert group.routed_experts[:-1, 0, 1].tolist() == list(range(9))


async def test_branches_have_experts_of_their_own_turns() -> None:
    prompt = np.array([5, 6], np.int32)
    branch = Branch(turns=[prompt, np.array([7], np.int32), turn("c", 3, 2)])
    result = RolloutResult(turns=[prompt, turn("ab", 2, 1)], branches=[branch], reward=1.0)

    group = await sampled(lambda: Given(result), NoOpPolicy())

    assert calls_of(group) == "1111." + "2222."


async def test_a_record_of_a_shorter_or_longer_history_still_covers_its_turn() -> None:
    """An agent's history may be cut, or begin with tokens that the sequence lacks."""
    prompt = np.array([5, 6, 7], np.int32)
    cut = await sampled(lambda: Given(RolloutResult(turns=[prompt, turn("ab", 1, 1)], reward=1.0)), NoOpPolicy())
    longer = await sampled(lambda: Given(RolloutResult(turns=[prompt, turn("ab", 9, 1)], reward=1.0)), NoOpPolicy())

    assert calls_of(cut) == "..111."
    assert calls_of(longer) == "11111."
    assert longer.routed_experts is not None
    assert longer.routed_experts[:5, 0, 1].tolist() == [6, 7, 8, 9, 10]


async def test_without_a_record_of_every_turn_there_is_no_column() -> None:
    prompt = np.array([5], np.int32)
    result = RolloutResult(turns=[prompt, turn("ab", 1, 1), completion_of("x")], reward=1.0)

    group = await sampled(lambda: Given(result), NoOpPolicy())

    assert group.routed_experts is None


async def test_records_of_several_models_are_refused() -> None:
    prompt, other = np.array([5], np.int32), turn("ab", 5, 2)
    wide = msgspec.structs.replace(other, routed_experts=np.ones((8, 2, 2), np.uint8))

    with pytest.raises(InvalidRecord, match="routed_experts: expected turns of one model"):
        await sampled(lambda: Given(RolloutResult(turns=[prompt, turn("ab", 1, 1), wide], reward=1.0)), NoOpPolicy())


async def test_a_source_says_that_it_fills_the_column_if_its_policy_records() -> None:
    filled = [
        SourceEnv(Game, policy, Letters()).stage_info().fills_columns
        for policy in (Recording(), Recording(routed_experts=False), NoOpPolicy())
    ]

    assert filled == [("behavior_logprobs", "routed_experts"), ("behavior_logprobs",), ("behavior_logprobs",)]
