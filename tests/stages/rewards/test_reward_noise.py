"""The parts of one sequence's reward change the advantage of no other sequence."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.stages.modes import GATHERING, MODES, MODES_OF_LIBRARIES, MODES_OF_SUMS, of_score

from penstock import AdvantageNormalizer, Batcher, RewardBridge, TrajectoryGroup
from penstock.rewards import RewardFunction
from penstock.testing import drive, group

NOISE = 4 * float(np.finfo(np.float32).eps)
"""The relative difference of two sums of float32 that still count as equal."""

ISSUED = [1.0, 1.0, 0.0, -2e6]
CLIPPED = [1.0, 1.0, 0.0, -1.0]


def of_rewards(rewards: Sequence[float], number: int = 0, **more: Any) -> TrajectoryGroup:
    """Return sequences of one trained token each, for which a critic expected 0."""
    size = len(rewards)
    plain = group(completion_lengths=[1] * size, prompt_length=1, rewards=rewards, instance_id=str(number), **more)
    return msgspec.structs.replace(plain, values=np.zeros(2 * size, np.float32))


def normalizer(mode: Any, preset: Any = None, batch_groups: int = 2) -> AdvantageNormalizer:
    gathers = mode in GATHERING or (mode == "gae" and preset in ("verl", "skyrl"))
    return AdvantageNormalizer(
        mode, batch_groups=batch_groups if gathers else None, preset=preset, components=of_score(mode)
    )


def advantages(out: Sequence[TrajectoryGroup]) -> list[list[float]]:
    """Return the advantage of each sequence of each group."""
    found = []
    for filled in out:
        assert filled.advantages is not None
        found.append(filled.advantages[1::2].tolist())
    return found


async def clipped(groups: Sequence[TrajectoryGroup], **config: Any) -> list[TrajectoryGroup]:
    return list(await drive(RewardBridge.from_config({"clip": [-1, 1], **config}), groups))


# -- one reward that was cut off -------------------------------------------------------------------------------------


OF_SUMS = [*[(None, mode) for mode in MODES], *MODES_OF_LIBRARIES]


@pytest.mark.parametrize(("library", "mode"), [pair for pair in OF_SUMS if pair[1] in MODES_OF_SUMS], ids=str)
async def test_a_score_that_was_cut_off_counts_as_the_bound(library: Any, mode: Any) -> None:
    given = [of_rewards(ISSUED), of_rewards([1, 1, 0, 0], 1)]
    plain = [of_rewards(CLIPPED), of_rewards([1, 1, 0, 0], 1)]

    out = await drive(normalizer(mode, library), await clipped(given))
    expected = await drive(normalizer(mode, library), plain)

    assert advantages(out) == advantages(expected)
    assert len(set(advantages(out)[0])) == 3


@pytest.mark.parametrize("score", [-2e6, -1e8, -3e20, -1e30])
async def test_the_bound_is_exact_however_much_was_cut_off(score: float) -> None:
    (out,) = await clipped([of_rewards([score, -score, -1, 0.25])])

    assert out.rewards.tolist() == [-1, 1, -1, 0.25]
    assert out.reward_noise is not None
    assert out.reward_noise.tolist() == pytest.approx([NOISE, NOISE, NOISE, 0.25 * NOISE])


async def test_a_fallback_that_decided_leaves_its_bound() -> None:
    bridge = RewardBridge.from_config(
        {"combine": "fallback", "right_from": 2.0, "length_bounty": {"reward": 1e8, "cap": 1e9}}
    )

    (out,) = await drive(bridge, [of_rewards([0, 3, 2.5, 2])])

    assert out.rewards.tolist() == [2, 3, 2.5, 2]
    assert out.reward_noise is not None
    assert out.reward_noise.tolist() == pytest.approx([2 * NOISE, 3 * NOISE, 2.5 * NOISE, 2 * NOISE])
    (filled,) = await drive(normalizer("dr_grpo"), [out])
    assert advantages([filled]) == [[-0.375, 0.625, 0.125, -0.375]]


async def test_what_one_bridge_cut_off_is_no_noise_behind_the_next() -> None:
    (between,) = await clipped([of_rewards(ISSUED)])
    second = RewardBridge.from_config({"length_bounty": {"reward": -0.25, "cap": 1}})

    (out,) = await drive(second, [between])

    assert out.rewards.tolist() == [0.75, 0.75, -0.25, -1.25]
    assert out.reward_noise is not None
    assert out.reward_noise.tolist() == pytest.approx([1.25 * NOISE, 1.25 * NOISE, 0.25 * NOISE, 1.25 * NOISE])


async def test_one_reward_cut_off_long_ago_takes_nothing_from_a_whole_run() -> None:
    groups = [of_rewards([1, 0, 0, -1e8]), *[of_rewards([1, 0, 1, 0], number) for number in range(1, 501)]]
    given = await clipped(groups)
    first, second = normalizer("global"), normalizer("global")

    before = await drive(first, given[:250])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    after = await drive(second, given[250:])

    assert all(any(row) for row in advantages([*before, *after]))
    assert advantages(after)[-1] == pytest.approx([1, -1, 1, -1], abs=0.01)
    assert second.state_dict()["count"] == 4 * 501


async def test_a_group_with_a_reward_that_was_cut_off_is_not_dropped() -> None:
    given = [*await clipped([of_rewards(ISSUED), of_rewards([-2e6, -3e7, -1, -1], 1)])]

    out = await drive(Batcher(max_tokens=100, drop_zero_variance=True), given)

    assert [one.instance_id for batch in out for one in batch.groups] == ["0"]
    assert out.ledger.balance().reasons["filtered"] == {"zero variance": 4}


async def test_two_rewards_beside_a_noisy_one_differ_by_what_they_differ() -> None:
    """3e7 and −3e7 added to a reward leave noise of 29: in that reward, and in no other."""
    cancelling = {"score": [1, 0, 0.5], "up": [0, 0, 3e7], "down": [0, 0, -3e7]}
    given = of_rewards([1, 0, 0.5]).with_rewards([1, 0, 0.5], parts=cancelling)
    alone = of_rewards([1, 1, 0.5]).with_rewards([1, 1, 0.5], parts=cancelling | {"score": [1, 1, 0.5]})

    out = await drive(normalizer("dr_grpo"), [given, alone])

    assert advantages(out) == [[0.5, -0.5, 0], [0, 0, 0]]


# -- parts outside the sum -------------------------------------------------------------------------------------------

DIAGNOSTICS = [{"tokens_seen": [3e7] * 4}, {"up": [3e7, 0, 0, 0], "down": [-3e7, 0, 0, 0]}, {"nanoseconds": [1e18] * 4}]


@pytest.mark.parametrize("parts", DIAGNOSTICS, ids=["same", "cancelling", "huge"])
@pytest.mark.parametrize("bridged", [False, True])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "none"])
async def test_a_diagnostic_takes_no_advantage_from_anything(
    mode: Any,
    parts: dict[str, list[float]],
    bridged: bool,  # noqa: FBT001 (a case)
) -> None:
    rewards = [1.0, 0.0, 0.5, 0.0]
    noted = [of_rewards(rewards, number, reward_parts=parts) for number in range(2)]
    plain = [of_rewards(rewards, number) for number in range(2)]
    if bridged:
        noted = await clipped(noted)

    out = await drive(normalizer(mode), noted)

    assert advantages(out) == advantages(await drive(normalizer(mode), plain))
    kept = await drive(Batcher(max_tokens=100, drop_zero_variance=True), noted)
    assert [len(batch) for batch in kept] == [8]


async def test_beside_a_diagnostic_noise_is_still_noise() -> None:
    """0.7 − 0.7 and 0.3 − 0.3 as sums of float32 are 1e-8 apart."""
    scores = np.array([0.7, 0.3], np.float32)
    bridge = RewardBridge(functions=[RewardFunction(_less_its_answer, reads_text=False)])
    given = of_rewards(scores.tolist(), reward_parts={"tokens_seen": [3e7, 1e7]}, meta={"less": [0.7, 0.3]})

    (out,) = await drive(bridge, [given])

    assert len(set(out.rewards.tolist())) == 2
    assert advantages(await drive(normalizer("grpo"), [out])) == [[0, 0]]


# -- metrics ---------------------------------------------------------------------------------------------------------


async def frac_zero_std(stage: AdvantageNormalizer, groups: Sequence[TrajectoryGroup]) -> float:
    return (await drive(stage, groups)).metrics.emit(0)["frac_reward_zero_std"]


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "none"])
async def test_the_metric_counts_groups_as_they_were_treated(mode: Any) -> None:
    given = await clipped([of_rewards(ISSUED), of_rewards([1, 1, 1, 1], 1)])

    assert await frac_zero_std(normalizer(mode), given) == 0.5


@pytest.mark.parametrize("mode", ["grpo", "batch"])
async def test_a_deviation_that_a_library_takes_for_none_is_counted_as_none(mode: Any) -> None:
    near = [of_rewards([0, 1e-6], number) for number in range(2)]

    assert await frac_zero_std(normalizer(mode, "roll"), near) == 1
    assert await frac_zero_std(normalizer(mode), near) == 0


# -- whatever the scores, the parts and the clip ---------------------------------------------------------------------


async def _less_its_answer(answer: Any) -> float:
    return -float(answer.meta["less"][answer.trajectory.id.repetition_id])


async def _added(answer: Any) -> float:
    return float(answer.meta["added"][answer.trajectory.id.repetition_id])


numbers = st.one_of(
    st.integers(-8, 8).map(lambda n: n / 4),
    st.sampled_from([0.1, 0.3, 0.7, -0.7, 1e-8, 3e7, -3e7, -2e6, -1e8]),
    st.floats(-1e9, 1e9, width=32),
)
rows = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=5)
bounds = st.tuples(numbers, numbers).filter(lambda pair: pair[0] < pair[1])


def noise_of(score: float, added: float, clip: tuple[float, float] | None) -> tuple[float, float]:
    """Return the reward and its possible rounding error, by definition."""
    total = score + added
    reward = total if clip is None else min(max(total, clip[0]), clip[1])
    summed = abs(score) + abs(added) if reward == total else abs(reward)
    return float(np.float32(reward)), NOISE * max(summed, abs(reward))


def are_refused(rows: Sequence[tuple[float, float]], clip: tuple[float, float] | None) -> bool:
    """Return whether rewards of a group differ by less than float32 can hold, which tests/schemas/test_noise.py has."""
    exact = np.array([score + added for score, added in rows])
    exact = exact if clip is None else np.clip(exact, *clip)
    largest, spread = np.abs(exact).max(), np.ptp(exact)
    moved = np.abs(exact.astype(np.float32) - exact).max()
    return bool(largest >= 2**20 and spread > 0 and (moved > 1e-3 * spread or spread < 1e-5 * largest))


def differ(population: Sequence[tuple[float, float]]) -> bool:
    """Return whether any two rewards differ by more than their noise; cases on the edge are excluded."""
    found = False
    for place, (one, n) in enumerate(population):
        for other, m in population[:place]:
            assume(not math.isclose(abs(one - other), n + m, rel_tol=1e-3) or one == other)
            found |= abs(one - other) > n + m
    return found


def centred(population: Sequence[float]) -> list[float]:
    mean = math.fsum(population) / len(population)
    return [value - mean for value in population]


def scaled(population: Sequence[float]) -> list[float]:
    apart = centred(population)
    deviation = math.sqrt(math.fsum(c * c for c in apart) / max(len(apart) - 1, 1))
    return [c / (deviation + 1e-6) for c in apart]


def expected(mode: Any, groups: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """Compute the formulas for the rewards."""
    everything = [pair for rows in groups for pair in rows]
    if mode in ("batch", "reinforce++"):
        values = [reward for reward, _ in everything]
        return scaled(values) if differ(everything) else [0.0] * len(values)
    if mode == "global":
        seen = [everything[: sum(map(len, groups[: n + 1]))] for n in range(len(groups))]
        return [
            a
            for rows, population in zip(groups, seen, strict=True)
            for a in (expected("batch", [population])[-len(rows) :])
        ]
    if mode == "reinforce++-baseline":
        expected_values = iter(
            scaled([a for rows in groups if differ(rows) for a in centred([r for r, _ in rows])] or [0.0])
        )
        return [next(expected_values) if kept else 0.0 for rows in groups for kept in [differ(rows)] * len(rows)]
    by_group = []
    for rows in groups:
        values = [reward for reward, _ in rows]
        apart = scaled(values) if mode == "grpo" else centred(values)
        factor = len(rows) / max(len(rows) - 1, 1) if mode == "rloo" else 1.0
        by_group.append([factor * a for a in apart] if differ(rows) else [0.0] * len(rows))
    return [a for rows in by_group for a in rows]


@pytest.mark.parametrize("mode", [mode for mode in MODES_OF_SUMS if mode not in ("none", "gae", "maxrl")])
@settings(max_examples=15)
@given(batch=st.lists(rows, min_size=1, max_size=3), clip=st.none() | bounds, diagnostic=numbers)
def test_advantages_are_those_of_the_final_rewards_but_for_equal_ones(
    mode: Any, batch: list[list[tuple[float, float]]], clip: tuple[float, float] | None, diagnostic: float
) -> None:
    config = {} if clip is None else {"clip": list(clip)}
    bridge = RewardBridge.from_config(config, functions=[RewardFunction(_added, name="added", reads_text=False)])
    given = [
        of_rewards(
            [score for score, _ in rows],
            number,
            reward_parts={"noted": [diagnostic] * len(rows)},
            meta={"added": [added for _, added in rows]},
        )
        for number, rows in enumerate(batch)
    ]
    final = [[noise_of(float(np.float32(score)), added, clip) for score, added in rows] for rows in batch]
    assume(not any(are_refused([(float(np.float32(score)), added) for score, added in rows], clip) for rows in batch))

    shaped = anyio.run(drive, bridge, given)
    out = anyio.run(drive, normalizer(mode, batch_groups=len(batch)), shaped)

    assert [one.rewards.tolist() for one in shaped] == [[reward for reward, _ in rows] for rows in final]
    found = [advantage for row in advantages(out) for advantage in row]
    largest = max((abs(reward) for rows in final for reward, _ in rows), default=0.0)
    assert found == pytest.approx(expected(mode, final), rel=1e-4, abs=1e-4 + 1e-6 * largest)
