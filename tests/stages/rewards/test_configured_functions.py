from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.stages.answers import answering, drive_text

from penstock import RewardBridge
from penstock.errors import InvalidConfig

REWARDS = """
from penstock.rewards import RewardFunction

def accuracy(completions, answer, **columns):
    return [float(completion == right) for completion, right in zip(completions, answer)]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)

def length(completion):
    return float(len(completion.text))

short = RewardFunction(lambda completion: -float(len(completion.text)), name="short", weight=0.5, concurrency=2)
LIMIT = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in a folder with a file of rewards, and forget what was imported from it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_reward.py").write_text(REWARDS)
    yield tmp_path
    sys.modules.pop("my_reward", None)


def bridge(*functions: dict[str, Any]) -> RewardBridge:
    return RewardBridge.from_config({"functions": functions})


def test_a_yaml_file_names_functions_of_every_kind_with_weights(folder: Path) -> None:
    (folder / "reward.yaml").write_text(
        """
        length_bounty: {reward: 0.01, cap: 1}
        functions:
          - {function: "my_reward:accuracy", weight: 2}
          - {function: "my_reward:compute_score", kind: verl, name: exact, reward_timeout_s: 5}
          - {function: "my_reward:length", kind: completion, weight: 0.1}
          - {function: "my_reward:short"}
        """
    )
    stage = RewardBridge.from_yaml("reward.yaml")

    (out,) = anyio.run(drive_text, stage, [answering("4", "five", meta={"prompt": "2+2?", "row": {"answer": "4"}})])

    parts = {name: [round(x, 6) for x in part.tolist()] for name, part in out.reward_parts.items()}
    assert parts == {
        "score": [0, 0],
        "length_bounty": [0.01, 0.04],
        "accuracy": [2, 0],
        "exact": [1, 0],
        "length": [0.1, 0.4],
        "short": [-0.5, -2],
    }


def test_options_of_the_configuration_replace_those_of_a_component() -> None:
    (component,) = bridge({"function": "my_reward:short", "weight": 3, "on_failure": "raise"}).components

    assert (component.weight, component.on_failure, component.concurrency) == (3, "raise", 2)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ({"function": "my_reward.accuracy"}, r"reward\.functions\[1\]\.function: expected module:name"),
        ({"function": "my_rewards:accuracy"}, r"reward\.functions\[1\]\.function: .*did you mean 'my_reward'\?"),
        ({"function": "my_reward:acuracy"}, r"reward\.functions\[1\]\.function: .*did you mean 'accuracy'\?"),
        ({"function": "my_reward:LIMIT"}, r"reward\.functions\[1\]: function: .* a function or a component, got 3"),
        ({"function": "my_reward:short", "kind": "trl"}, r"reward\.functions\[1\]: kind: expected none"),
        ({"function": "my_reward:length", "concurrency": 0}, r"reward\.functions\[1\]: RewardFunction\.concurrency"),
        (
            {"function": "my_reward:length", "kind": "trll"},
            r"Expected one of trl, verl, completion, got 'trll' - at `\$\.functions\[1\]\.kind`",
        ),
        ({"function": "my_reward:length", "wait": 1}, r"unknown field `wait` - at `\$\.functions\[1\]`"),
    ],
)
def test_a_mistake_is_reported_with_its_path(function: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        bridge({"function": "my_reward:accuracy"}, function)
