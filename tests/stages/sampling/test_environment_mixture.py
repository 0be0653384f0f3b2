"""Several environments are one: each prompt belongs to one by its number, with metrics by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from tests.fake_policy import FakePolicy, Letters

from penstock import SourceEnv, TrajectoryGroup
from penstock.agents import AgentClient, Outcome
from penstock.data import PromptDataset
from penstock.environments import EnvironmentMixture
from penstock.errors import InvalidConfig
from penstock.testing import drive_source

WORDS = PromptDataset([{"prompt": "a"}, {"prompt": "b"}], shuffle=False)
LONG = PromptDataset([{"prompt": "too long"}], max_prompt_tokens=1)


class Game:
    """Says its number."""

    async def drive(self, task: int, client: AgentClient) -> Outcome:
        await client.generate(np.array(Letters().encode(f"game {task}"), np.int32))
        return Outcome(reward=1.0, metrics={"task": task})


class Steps:
    """Says its seed."""

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        return f"seed {seed}", {}

    def step(self, _: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 2.0, True, False, {}


def asked(group: TrajectoryGroup) -> str:
    return Letters().decode(group.tokens[~group.loss_mask].tolist())


MIXED = EnvironmentMixture({"words": (WORDS, 2), "game": (Game, 1), "steps": (Steps, 1)})


async def test_each_prompt_belongs_to_an_environment_by_its_number() -> None:
    whole = await drive_source(SourceEnv(MIXED, FakePolicy(), Letters(), group_size=1, groups=8, concurrency=1))
    rest = await drive_source(SourceEnv(MIXED, FakePolicy(), Letters(), group_size=1, groups=3, first_task=5))

    said = {group.meta["task"]: asked(group) for group in whole}
    names = [group.meta["data_source"] for group in whole]
    assert [said[number] for number in range(8)] == ["a", "game 0", "seed 0", "b", "a", "game 1", "seed 1", "b"]
    assert names == ["words", "game", "steps", "words"] * 2
    assert {group.meta["task"]: asked(group) for group in rest} == {number: said[number] for number in (5, 6, 7)}


async def test_numbers_of_an_environment_have_its_name() -> None:
    ran = await drive_source(SourceEnv(MIXED, FakePolicy(), Letters(), group_size=1, groups=8))

    assert ran.metrics.emit(0)["env/game/task"] == 0.5


async def test_an_environment_whose_prompts_are_too_long_does_not_end_the_others() -> None:
    mixed = EnvironmentMixture({"long": (LONG, 1), "game": (Game, 1)})

    ran = await drive_source(SourceEnv(mixed, FakePolicy(), Letters(), group_size=1, groups=4))

    assert [group.meta["data_source"] for group in ran] == ["game"] * 2
    assert not ran.ledger.epoch.none_fits


def test_its_identity_is_that_of_its_data_and_of_its_shares() -> None:
    assert MIXED.identity() == {
        "kind": "environments",
        "environments": {"words": WORDS.identity(), "game": None, "steps": None},
        "places": [2, 1, 1],
    }


@pytest.mark.parametrize(
    ("environments", "message"),
    [
        ({}, "EnvironmentMixture.environments: expected at least one, got none"),
        ({"a": Game}, "environments\\['a'\\]: expected \\(make_env, weight\\), got"),
        ({"a": (Game, 0)}, "environments\\['a'\\]: expected a finite number above 0, got 0"),
        ({"a": (Game, 1), "b": (Game, 1e-9)}, "expected at least a thousandth of all, got less for 'b'"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(environments: Mapping[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        EnvironmentMixture(environments)
