"""A curriculum leaves rows out that were always or never solved, whatever process makes the prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from anyio import to_thread
from tests.fake_policy import FakePolicy, Letters

from penstock import SourceEnv, TrajectoryGroup
from penstock.data import Curriculum, Mixture, PromptDataset, SuccessRates
from penstock.errors import InvalidConfig
from penstock.policies import SamplingParams
from penstock.testing import drive, drive_source, group
from penstock.training import ResumePoint

ROWS: list[dict[str, Any]] = [{"prompt": f"{n}+1="} for n in range(8)]

REWARDS = {0: [1.0, 1.0], 1: [0.0, 0.0], 2: [1.0, 0.0]}
"""Rewards of the rollouts of rows: one that is always solved, one that never is, and one that sometimes is."""


@pytest.fixture
def dataset(tmp_path: Path) -> PromptDataset:
    return PromptDataset(ROWS, shuffle=False, curriculum=Curriculum(tmp_path / "made" / "rows", revisit=4))


def sampled(rewards: dict[int, list[float]] = REWARDS) -> list[TrajectoryGroup]:
    return [
        group(env="rows", instance_id=str(number), completion_lengths=[2, 2], rewards=each)
        for number, each in rewards.items()
    ]


async def left_out(dataset: PromptDataset | Mixture, numbers: range) -> dict[int, str]:
    """Return why prompts are left out, by their numbers."""

    def read() -> dict[int, str]:
        prompts = dataset()
        return {number: reason for number in numbers if (reason := prompts.prompt(number).left_out)}

    return await to_thread.run_sync(read)


async def test_rows_that_were_always_or_never_solved_are_left_out_of_the_next_epoch(dataset: PromptDataset) -> None:
    passed = await drive(SuccessRates(dataset), sampled())

    assert [each.instance_id for each in passed] == ["0", "1", "2"]
    assert (await left_out(dataset, range(8, 16))) == {
        8: "too easy: its mean reward was high",
        9: "too hard: its mean reward was low",
    }


async def test_before_any_reward_is_known_no_row_is_left_out(dataset: PromptDataset) -> None:
    assert (await left_out(dataset, range(32))) == {}


async def test_a_row_that_is_left_out_returns_in_one_of_so_many_epochs(dataset: PromptDataset) -> None:
    await drive(SuccessRates(dataset), sampled({3: [1.0, 1.0]}))

    epochs = [epoch for epoch in range(12) if epoch * 8 + 3 not in (await left_out(dataset, range(96)))]

    assert epochs == [1, 5, 9]


async def test_the_last_reward_of_a_row_decides(dataset: PromptDataset) -> None:
    await drive(SuccessRates(dataset), sampled({0: [1.0, 1.0], 8: [1.0, 0.0], 1: [1.0, 0.0], 9: [1.0, 1.0]}))

    assert set(await left_out(dataset, range(16, 24))) == {17}


async def test_prompts_that_were_opened_before_see_rewards_that_come_later(dataset: PromptDataset) -> None:
    prompts = await to_thread.run_sync(dataset)
    assert not (await to_thread.run_sync(prompts.prompt, 8)).left_out

    await drive(SuccessRates(dataset), sampled())

    assert (await to_thread.run_sync(prompts.prompt, 8)).left_out


async def test_each_set_of_a_mixture_has_its_own(dataset: PromptDataset, tmp_path: Path) -> None:
    other = replace(dataset, name="other", curriculum=Curriculum(tmp_path / "other"))
    plain = replace(dataset, name="plain", curriculum=None)
    mixture = Mixture([dataset, other, plain], [1, 1, 1])
    prompts = await to_thread.run_sync(mixture)
    rows = {number: prompts.place_of(number) for number in range(48)}
    first = {
        name: next(at for at, (which, place) in rows.items() if which == name and place == 0)
        for name in ("rows", "other", "plain")
    }

    await drive(SuccessRates(mixture), sampled({first["other"]: [1.0, 1.0], first["plain"]: [1.0, 1.0]}))

    again = [rows[number] for number in (await left_out(mixture, range(24, 48)))]
    assert again == [("other", 0)]


async def test_a_resumed_run_leaves_out_what_the_first_one_did(dataset: PromptDataset) -> None:
    stage = SuccessRates(dataset)
    await drive(stage, sampled())
    state, before = stage.state_dict(), (await left_out(dataset, range(8, 16)))
    await drive(SuccessRates(dataset), sampled({4: [1.0, 1.0]}))

    resumed = SuccessRates(dataset)
    resumed.load_state_dict(state)
    await drive(resumed, [])

    assert (await left_out(dataset, range(8, 16))) == before


async def test_a_run_of_its_own_begins_without_rewards(dataset: PromptDataset) -> None:
    await drive(SuccessRates(dataset), sampled())

    await drive(SuccessRates(dataset), [])

    assert (await left_out(dataset, range(8, 16))) == {}


async def test_a_set_of_another_name_and_file_goes_on_with_its_rewards(dataset: PromptDataset, tmp_path: Path) -> None:
    stage = SuccessRates(dataset)
    await drive(stage, sampled())
    moved = replace(dataset, name="renamed", curriculum=Curriculum(tmp_path / "moved"))

    resumed = SuccessRates(moved)
    resumed.load_state_dict(stage.state_dict())
    await drive(resumed, [])

    assert (await left_out(moved, range(8, 16))) == (await left_out(dataset, range(8, 16))) != {}


async def test_a_source_that_begins_first_reads_the_rewards_of_the_checkpoint(dataset: PromptDataset) -> None:
    stage = SuccessRates(dataset)
    await drive(stage, sampled())
    state, before = stage.state_dict(), (await left_out(dataset, range(8, 16)))
    await drive(SuccessRates(dataset), sampled({4: [1.0, 1.0]}))

    resumed = SuccessRates(dataset)
    resumed.load_state_dict(state)
    await to_thread.run_sync(resumed.resume_from, ResumePoint(1, {}))

    assert (await left_out(dataset, range(8, 16))) == before
    assert resumed.state_dict() == state


@pytest.mark.parametrize("state", [{"1": ""}, {"rows": ""}, {"0": 5}, {"0": "!"}, {"0": "AAA="}, [1], None], ids=str)
async def test_a_state_that_is_not_one_is_refused(dataset: PromptDataset, state: Any) -> None:
    with pytest.raises((ValueError, msgspec.ValidationError), match=r"expected the rewards|Expected|Invalid|multiple"):
        SuccessRates(dataset).load_state_dict(state)


async def test_a_file_that_is_read_is_replaced_instead_of_cut(dataset: PromptDataset) -> None:
    many = replace(dataset, source=ROWS * 2000)
    await drive(SuccessRates(many), sampled({15998: [1.0, 1.0]}))
    read = await to_thread.run_sync(many)
    assert (await to_thread.run_sync(read.prompt, 31998)).left_out

    await drive(SuccessRates(dataset), sampled())

    assert (await to_thread.run_sync(read.prompt, 31998)).left_out


async def test_a_state_of_other_rows_is_refused(dataset: PromptDataset) -> None:
    stage = SuccessRates(dataset)
    await drive(stage, [])

    other = SuccessRates(replace(dataset, source=ROWS[:3]))
    other.load_state_dict(stage.state_dict())
    with pytest.raises(ValueError, match="expected 3 numbers of rows, got 8"):
        await drive(other, [])


async def test_a_source_goes_on_past_rows_that_are_left_out(dataset: PromptDataset) -> None:
    await drive(SuccessRates(dataset), sampled())
    sampling = SamplingParams(max_completion_tokens=2)
    source = SourceEnv(dataset, FakePolicy(), Letters(), sampling=sampling, group_size=2, groups=16)

    groups = await drive_source(source)

    assert not {"8", "9"} & {each.instance_id for each in groups}
    assert set(groups.ledger.balance().reasons["rejected"]) == {
        "too easy: its mean reward was high",
        "too hard: its mean reward was low",
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"easy": 0.0}, "Curriculum.easy: expected a number above hard, 0.0, got 0.0"),
        ({"hard": "0"}, "easy: expected a number above hard, 0, got 1.0"),
        ({"easy": True}, "easy: expected a number above hard, 0.0, got True"),
        ({"revisit": 0}, "Curriculum.revisit: expected a whole number of at least 1, got 0"),
        ({"easy": float("nan")}, "easy: expected a number above hard, 0.0, got nan"),
    ],
)
def test_a_curriculum_without_rows_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        Curriculum("rows", **fields)


def test_rates_without_a_curriculum_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="expected a set with a curriculum, got none"):
        SuccessRates(PromptDataset(ROWS))
