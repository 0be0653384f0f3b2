"""Environments of penstock by the methods of gem, as ROLL's env manager calls them."""

from __future__ import annotations

from typing import Any

import pytest

from penstock._stages.integrations.roll.gem_environment import META, GemEnvironment
from penstock.errors import InvalidConfig, InvalidPipeline


def made(name: str, **options: Any) -> GemEnvironment:
    return GemEnvironment(f"tests.roll.environments:{name}", **options)


def test_the_seed_of_an_episode_numbers_the_questions_of_a_data_set() -> None:
    env = made("Sums", count=2)

    assert [env.reset(seed=seed)[0] for seed in (0, 1, 2)] == ["0+1=", "1+1=", "0+1="]


def test_the_answer_is_scored_without_the_text_that_ends_it() -> None:
    env = made("Sums")
    env.ends = ("<end>",)
    env.reset(seed=1)

    assert env.step(action="2<end>") == ("", 1.0, True, False, {})
    assert env.step(action="3<end>")[1] == 0.0


def test_prompts_are_scored_later_by_what_their_row_says() -> None:
    env = made("Questions")

    assert env.reset(seed=7) == ("question 7", {META: {"row": {"answer": "7"}}})
    assert env.step(action="7") == ("", 0.0, True, False, {})


def test_a_step_wise_environment_keeps_its_turns_and_what_it_says_of_them() -> None:
    env = made("Walk")

    assert env.reset(seed=3) == ("start 3", {"suffix": "s", META: {}})
    assert env.step(action="on") == ("after on", 0.5, False, False, {"suffix": "s"})
    assert env.step(action="stop")[2]
    env.close()
    made("Sums").close()  # has nothing to close


def test_prompts_of_tokens_are_refused() -> None:
    with pytest.raises(InvalidPipeline, match="expected prompts of text, got tokens"):
        made("Tokens").reset(seed=0)


def test_what_is_no_environment_is_refused() -> None:
    with pytest.raises(InvalidPipeline, match="expected an environment with len"):
        GemEnvironment("builtins:object")
    with pytest.raises(InvalidConfig, match=r"custom_envs\.<tag>\.env_config\.env: expected a name in"):
        made("Sum")
