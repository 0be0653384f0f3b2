"""Baselines of agents and of turns: what is compared with its like in the other rollouts of a group."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import AdvantageNormalizer, TrajectoryGroup
from penstock.errors import InvalidConfig, InvalidRecord
from penstock.testing import drive

Turns = list[float]
"""The rewards of the turns of one sequence."""

Rollout = list[tuple[int, Turns]]
"""The sequences of a rollout: the agent of each, and its turns."""


def made(rollouts: list[Rollout], number: int = 0, rewards: list[float] | None = None) -> TrajectoryGroup:
    """Return a group of rollouts; a turn has two tokens, behind one of the environment, and its reward on the last."""
    sequences = [sequence for rollout in rollouts for sequence in rollout]
    totals = rewards or [sum(sum(turns) for _, turns in rollout) for rollout in rollouts]
    counts = [len(rollout) for rollout in rollouts]
    return TrajectoryGroup.build(
        env="e",
        instance_id=str(number),
        sequences=[[1] * (3 * len(turns)) for _, turns in sequences],
        loss_mask=[[0, 1, 1] * len(turns) for _, turns in sequences],
        token_rewards=[[x for reward in turns for x in (0, 0, reward)] for _, turns in sequences],
        rewards=np.repeat(np.array(totals, np.float64), counts),
        rollout_ids=np.repeat(np.arange(len(rollouts)), counts),
        meta={"agents": [[agent for agent, _ in rollout] for rollout in rollouts]},
    )


async def advantages(groups: list[TrajectoryGroup], **options: Any) -> list[list[list[list[float]]]]:
    """Return the advantage of each turn, by group and rollout, sequence after sequence."""
    found = await drive(AdvantageNormalizer(**{"mode": "dr_grpo", "rewards": "token", **options}), groups)
    result = []
    for group in found:
        assert group.advantages is not None
        rollouts: dict[int, list[list[float]]] = defaultdict(list)
        for first, last, rollout in zip(group.offsets, group.offsets[1:], group.rollout_ids.tolist(), strict=False):
            tokens = group.advantages[first:last].reshape(-1, 3)
            assert not tokens[:, 0].any()
            assert (tokens[:, 1] == tokens[:, 2]).all()
            rollouts[rollout].append(tokens[:, 1].tolist())
        result.append(list(rollouts.values()))
    return result


async def test_a_turn_is_compared_with_the_same_turn_of_the_other_rollouts() -> None:
    group = made([[(0, [1.0, 0.0])], [(0, [0.0, 4.0])], [(0, [0.0])]])

    (found,) = await advantages([group], baseline="turn")

    # From the first turn on they earn 1, 4 and 0; from the second on 0 and 4.
    assert found == [[[pytest.approx(1 - 5 / 3), -2.0]], [[pytest.approx(4 - 5 / 3), 2.0]], [[pytest.approx(-5 / 3)]]]


async def test_later_turns_count_by_the_discount() -> None:
    group = made([[(0, [0.0, 0.0, 8.0])], [(0, [0.0, 0.0, 0.0])]])

    (found,) = await advantages([group], baseline="turn", gamma=0.5)

    assert found == [[[1.0, 2.0, 4.0]], [[-1.0, -2.0, -4.0]]]


async def test_an_agent_is_compared_with_the_same_agent_of_the_other_rollouts() -> None:
    planner, helper = 0, 1
    group = made(
        [
            [(planner, [1.0]), (helper, [10.0]), (planner, [2.0])],
            [(planner, [0.0, 1.0]), (helper, [30.0])],
            [(planner, [2.0])],
        ]
    )

    (found,) = await advantages([group], baseline="agent")

    assert found == [[[1.0], [-10.0], [1.0]], [[-1.0, -1.0], [10.0]], [[0.0]]]


async def test_the_reward_of_a_rollout_is_that_of_each_of_its_agents() -> None:
    group = made([[(0, [0.0]), (1, [0.0])], [(0, [0.0]), (1, [0.0])], [(0, [0.0])]], rewards=[3.0, 1.0, 2.0])

    (agents,) = await advantages([group], baseline="agent", rewards="sequence")
    (turns,) = await advantages([group], baseline="turn", rewards="sequence")

    assert agents == turns == [[[1.0], [1.0]], [[-1.0], [-1.0]], [[0.0]]]


async def test_one_agent_of_one_turn_is_compared_as_a_rollout_is() -> None:
    groups = [made([[(0, [x])] for x in (1.0, 4.0, 2.0, 2.0)], 0), made([[(0, [x])] for x in (7.0, 7.0)], 1)]

    for mode in ("grpo", "dr_grpo", "rloo", "maxrl", "opo"):
        whole, agents, turns = [
            await advantages(groups, mode=mode, baseline=baseline) for baseline in ("rollout", "agent", "turn")
        ]
        assert whole == agents == turns


def expected(rollouts: list[Rollout], baseline: str, gamma: float) -> list[list[float]]:
    """Return the advantages of all turns of each rollout, by loops."""
    values: list[list[tuple[tuple[int, int], float]]] = []
    for rollout in rollouts:
        later: dict[int, Turns] = defaultdict(list)
        for agent, turns in rollout:
            later[agent] += turns
        seen: dict[int, int] = defaultdict(int)
        own = []
        for agent, turns in rollout:
            for _ in turns:
                number, seen[agent] = seen[agent], seen[agent] + 1
                if baseline == "agent":
                    own.append(((agent, 0), sum(later[agent])))
                else:
                    rest = later[agent][number:]
                    own.append(((agent, number), sum(gamma**step * reward for step, reward in enumerate(rest))))
        values.append(own)
    sets: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    for place, own in enumerate(values):
        for key, value in own:
            sets[key][place] = value
    return [[value - sum(sets[key].values()) / len(sets[key]) for key, value in own] for own in values]


turns_of = st.lists(st.integers(-8, 8).map(float), min_size=1, max_size=4)
rollouts_of = st.lists(st.lists(st.tuples(st.integers(0, 2), turns_of), min_size=1, max_size=4), min_size=1, max_size=5)


@pytest.mark.parametrize("baseline", ["agent", "turn"])
@settings(max_examples=60)
@given(groups=st.lists(rollouts_of, min_size=1, max_size=3), gamma=st.sampled_from([1.0, 0.5]))
async def test_any_rollouts_are_compared_as_loops_compare_them(
    baseline: str, groups: list[list[Rollout]], gamma: float
) -> None:
    options = {"gamma": gamma} if baseline == "turn" else {}

    found = await advantages([made(each, number) for number, each in enumerate(groups)], baseline=baseline, **options)

    for rollouts, of_group in zip(groups, found, strict=True):
        for wanted, sequences in zip(expected(rollouts, baseline, gamma), of_group, strict=True):
            assert [value for turns in sequences for value in turns] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"mode": "reinforce++", "batch_groups": 2}, "baseline: expected rollout but with grpo, .* got reinforce"),
        ({"preset": "verl"}, "preset: expected none with baseline turn, got verl"),
        ({"baseline": "step"}, "baseline: expected"),
        ({"baseline": "agent", "gamma": 0.5}, "gamma: expected 1 but with"),
    ],
)
def test_a_baseline_that_cannot_be_computed_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidConfig, match=problem):
        AdvantageNormalizer(**{"mode": "grpo", "baseline": "turn", **options})


@pytest.mark.parametrize("agents", [5, [[0]], [[0, 1], None], [[0], ["a"]], [[0, -1], [0]], [[0, 1], [0, 1]]])
async def test_agents_of_other_sequences_are_refused_by_name(agents: object) -> None:
    group = made([[(0, [1.0]), (1, [1.0])], [(0, [2.0])]])
    group.meta["agents"] = agents

    with pytest.raises(InvalidRecord, match="e/0: meta 'agents': expected by repetition a list of the agent of each"):
        await advantages([group], baseline="agent")
