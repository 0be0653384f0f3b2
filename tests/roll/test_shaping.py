"""The reward bridge on an episode of ROLL's own env manager."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import RewardBridge
from penstock._stages.integrations.roll.gem_environment import META
from penstock._stages.integrations.roll.shaping import group_of, shape
from penstock.errors import RewardFunctionFailed


class Letters:
    """A tokenizer of one letter a token."""

    eos_id = 0

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Any) -> str:
        return "".join(chr(each) for each in ids)


def history(*replies: str, rewards: tuple[float, ...]) -> list[dict[str, Any]]:
    """Return the history of an episode, as ROLL keeps it."""
    turns: list[dict[str, Any]] = [
        {
            "prompt_ids": [5, 6],
            "response_ids": [ord(letter) for letter in reply],
            "infer_logprobs": [-0.5] * len(reply),
            "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": reply}],
            "reward": reward,
        }
        for reply, reward in zip(replies, rewards, strict=True)
    ]
    turns[0][META] = {"row": {"answer": "42"}}
    return [*turns, {"observation": "the end", "messages": None}]


def test_the_correction_is_added_to_the_last_turn() -> None:
    episode = history("abc", "de", rewards=(0.5, 1.0))

    shape(episode, "sums", RewardBridge.from_config({"length_bounty": {"reward": -0.125, "cap": 1}}), Letters())

    assert [turn["reward"] for turn in episode[:-1]] == [0.5, 1.0 - 5 * 0.125]
    assert episode[1]["metrics"] == {"rewards/length_bounty": -0.625, "rewards/score": 1.5}
    assert "metrics" not in episode[0]


def test_a_function_reads_the_row_and_the_messages_of_the_prompt() -> None:
    config = {"functions": [{"function": "tests.roll.environments:right"}]}
    bridge = RewardBridge.from_config(config)

    for reply, reward in (("42", 1.0), ("43", 0.0)):
        episode = history(reply, rewards=(0.0,))
        shape(episode, "sums", bridge, Letters())
        assert episode[0]["reward"] == reward

    assert group_of(history("42", rewards=(0.0,))[:1], "sums").meta["messages"] == [{"role": "user", "content": "q"}]


def test_an_empty_configuration_changes_no_reward() -> None:
    episode = history("abc", rewards=(0.75,))

    shape(episode, "sums", RewardBridge(), Letters())

    assert episode[0]["reward"] == 0.75


def test_an_episode_without_a_response_stays_as_it_is() -> None:
    episode: list[dict[str, Any]] = [{"observation": "too long", "messages": []}]

    shape(episode, "sums", RewardBridge(), Letters())

    assert episode == [{"observation": "too long", "messages": []}]


def test_a_function_that_fails_is_an_error_with_its_reason() -> None:
    config = {"functions": [{"function": "tests.roll.environments:broken"}]}

    with pytest.raises(RewardFunctionFailed, match=r"ROLL, sums: expected a reward, got none.*no reward for 1"):
        shape(history("a", rewards=(0.0,)), "sums", RewardBridge.from_config(config), Letters())
