"""A row with a value that JSON cannot hold is one failed group, with the place of the row and its column."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import IntEnum, StrEnum
from fractions import Fraction
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reasoning_gym
import structlog
from tests.fake_policy import FakePolicy, Letters

from penstock import SourceEnv, StopReason, TrajectoryGroup
from penstock.data import Prompt, PromptDataset
from penstock.environments import RolloutResult
from penstock.errors import InvalidData
from penstock.policies import Completion, NoOpPolicy
from penstock.testing import Driven, drive_source

GOOD: list[dict[str, Any]] = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(4)]


class Label(StrEnum):
    """Text of a class of its own."""

    RIGHT = "right"


class Level(IntEnum):
    """A number of a class of its own."""

    HARD = 3


def cyclic() -> list[Any]:
    inner: list[Any] = []
    inner.append(inner)
    return inner


async def sampled(make_env: Any, policy: Any = None, groups: int = 4) -> Driven[TrajectoryGroup]:
    source = SourceEnv(make_env, policy or FakePolicy(), Letters(), group_size=2, groups=groups)
    with structlog.testing.capture_logs():
        return await drive_source(source)


def failed(groups: Driven[TrajectoryGroup]) -> tuple[str, int]:
    ((reason, count),) = groups.ledger.balance().reasons["failed"].items()
    return reason, count


@pytest.mark.parametrize("place", [0, 2, 3])
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (10**30, "expected whole numbers of at most 64 bits, got one of 100 bits: write it as text"),
        (-(2**63) - 1, "expected whole numbers of at most 64 bits, got one of 64 bits and a sign: write it as text"),
        (2**64, "expected whole numbers of at most 64 bits, got one of 65 bits"),
        (10**5000, "expected whole numbers of at most 64 bits, got one of 16610 bits"),
        ([{"deep": [1, 10**30]}], "expected whole numbers of at most 64 bits"),
        ("\ud800", "expected text of Unicode, got a lone surrogate in '\\ud800'"),
        ({"\udfff": 1}, "expected text of Unicode, got a lone surrogate"),
        (cyclic(), "expected at most some hundred levels of lists and mappings, got more"),
        (b"png", "expected text, numbers, truth values"),
        (1 + 2j, "expected text, numbers, truth values"),
        ({(1, 2): 3}, "expected mappings with keys of text, numbers or truth values, got one of tuple"),
        ({1: "a", "1": "b"}, "expected mappings with one value for each key, got two for '1'"),
    ],
    ids=[
        "10**30",
        "below 64 bits",
        "2**64",
        "10**5000",
        "nested",
        "a surrogate",
        "a key",
        "a cycle",
        "bytes",
        "complex",
        "a key of two numbers",
        "a key twice",
    ],
)
async def test_a_row_of_a_list_fails_alone(answer: Any, message: str, place: int) -> None:
    rows = [*GOOD[:place], {"prompt": "x", "answer": answer}, *GOOD[place + 1 :]]

    groups = await sampled(PromptDataset(rows, shuffle=False))

    read = sorted((group.meta["row"] for group in groups), key=itemgetter("answer"))
    assert read == [*GOOD[:place], *GOOD[place + 1 :]]
    reason, count = failed(groups)
    assert f"row {place}: column 'answer': {message}" in reason
    assert count == 2


@pytest.mark.parametrize("answer", ["1" + "0" * 30, "-9223372036854775809", "9" * 5000, '"\\ud800"', "NaN", "1e999"])
async def test_a_line_of_a_file_fails_alone(answer: str, tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in GOOD]
    lines[2] = f'{{"prompt": "x", "answer": {answer}}}'
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))

    groups = await sampled(PromptDataset(tmp_path / "rows.jsonl", shuffle=False))

    assert sorted(group.meta["row"]["answer"] for group in groups) == [1, 2, 4]
    reason, count = failed(groups)
    assert f"{tmp_path}/rows.jsonl:3: " in reason
    assert count == 2


@pytest.mark.parametrize("text", ['{"prompt": "a", "prompt": "b"}', '{"prompt": "a", "info": [{"n": 1, "n": 2}]}'])
def test_a_line_with_a_key_given_twice_is_refused_with_the_key(text: str, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "first"}\n' + text)
    prompts = PromptDataset(tmp_path / "data.jsonl", shuffle=False)()

    with pytest.raises(InvalidData, match=r"data.jsonl:2: .* got the key '(prompt|n)' twice in one object"):
        prompts.prompt(1)


async def test_a_row_of_parquet_fails_alone(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"prompt": ["a", "b"], "answer": [None, b"png"]}), tmp_path / "rows.parquet")

    groups = await sampled(PromptDataset(tmp_path / "rows.parquet", shuffle=False), groups=2)

    assert [group.meta["prompt"] for group in groups] == ["a"]
    assert f"{tmp_path}/rows.parquet: row 1: column 'answer': expected text, numbers" in failed(groups)[0]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2**64 - 1, 2**64 - 1),
        (-(2**63), -(2**63)),
        (Label.RIGHT, "right"),
        (Level.HARD, 3),
        ({Label.RIGHT: Level.HARD}, {"right": 3}),
        (np.datetime64("2026-11-26T01:02:03.000000004"), "2026-11-26T01:02:03"),
        (np.array(["2026-11-26", "NaT"], "datetime64[ns]"), ["2026-11-26T00:00:00", None]),
    ],
)
async def test_a_value_that_json_can_hold_reaches_the_reward(value: Any, expected: Any) -> None:
    (group,) = await sampled(PromptDataset([{"prompt": "x", "answer": value}]), groups=1)

    assert group.meta["row"] == {"prompt": "x", "answer": expected}
    assert type(group.meta["row"]["answer"]) is type(expected)


def test_rows_of_which_none_of_the_first_can_be_read_are_refused_when_they_are_opened() -> None:
    rows = [{"prompt": "x", "answer": 10**30}] * 100

    with pytest.raises(InvalidData, match="row 0: column 'answer': expected whole numbers of at most 64 bits"):
        PromptDataset(rows)()


class Prompts:
    """Prompts of a class of the user, of which one has a value in `meta` that JSON cannot hold."""

    def prompt(self, number: int) -> Any:
        return Prompt(content="x", meta={"answer": 10**30 if number == 1 else number})


class Rollouts:
    """Rollouts from outside."""

    def rollout(self, task: int, repetition: int) -> RolloutResult:
        tokens = np.array([5 + repetition, 0], np.int32)
        said = Completion(
            tokens=tokens, logprobs=None, policy_versions=np.zeros(2, np.int64), stop_reason=StopReason.STOP
        )
        meta = {"answer": object() if task == 1 else task}
        return RolloutResult(turns=[np.array([7], np.int32), said], reward=0.0, meta=meta)


@pytest.mark.parametrize(("make_env", "policy"), [(Prompts, None), (Rollouts, NoOpPolicy())])
async def test_facts_of_an_environment_that_json_cannot_hold_fail_their_rollouts_alone(
    make_env: Callable[[], Any], policy: Any
) -> None:
    groups = await sampled(make_env, policy)

    assert sorted(group.meta["task"] for group in groups) == [0, 2, 3]
    reason, count = failed(groups)
    assert reason.startswith("environment raised InvalidRecord: meta: expected values that JSON can hold")
    assert count == 2


@pytest.mark.parametrize(
    ("value", "held"),
    [
        ({0: 1, 10: 2}, {"0": 1, "10": 2}),
        ({1.5: "a", True: "b", None: "c"}, {"1.5": "a", "true": "b", "null": "c"}),
        ({np.int64(3): [{Level.HARD: 1}], Label.RIGHT: 2}, {"3": [{"3": 1}], "right": 2}),
        (Fraction(1, 3), "1/3"),
        ([Fraction(-7, 2), Fraction(4)], ["-7/2", "4"]),
    ],
)
def test_keys_and_fractions_reach_the_reward_as_the_text_that_json_has_for_them(value: Any, held: Any) -> None:
    prompts = PromptDataset([{"prompt": "?", "answer": value}])

    assert prompts().prompt(0).meta["row"]["answer"] == held
    assert prompts.identity() == PromptDataset([{"prompt": "?", "answer": value}]).identity()


@pytest.mark.parametrize("name", ["graph_color", "gsm_symbolic", "codeio"])
def test_rows_of_reasoning_gym_are_rows(name: str) -> None:
    made = reasoning_gym.create_dataset(name, seed=3, size=24)

    rows = PromptDataset([made[number] for number in range(24)], prompt="question", shuffle=False)()

    held = [rows.prompt(number).meta["row"] for number in range(24)]
    assert [row["question"] for row in held] == [made[number]["question"] for number in range(24)]
