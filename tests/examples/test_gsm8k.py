"""The word problems have the format of GSM8K, and both forms of the reward agree on answers to them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from penstock.errors import InvalidConfig
from penstock.runs import describe_run, load_run_config, train

FOLDER = Path(__file__).parent.parent.parent / "examples" / "gsm8k"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the files of the example, which is the current one."""
    for name in ("config.yaml", "warm_up.yaml", "prepare.py", "reward.py"):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("prepare", "reward"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def module(name: str) -> Any:
    return importlib.import_module(name)


def shorten(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Let the warm-up have so many steps."""
    warm_up = Path("warm_up.yaml")
    warm_up.write_text(warm_up.read_text("utf-8").replace("steps: 450", f"steps: {steps}"), "utf-8")
    monkeypatch.setattr(module("prepare"), "CONVERSATIONS", 64 * steps)


@pytest.mark.parametrize(
    ("answer", "score"),
    [("3+4=7\n#### 7", 1.0), ("#### 1,007", 0.0), ("#### 8\n#### 7", 1.0), ("so 3+4 is 7.", 1.0), ("", 0.0)],
)
@pytest.mark.usefixtures("here")
def test_both_rewards_compare_the_number_at_the_end(answer: str, score: float) -> None:
    reward = module("reward")

    assert reward.correct([answer], ["2+5=7\n#### 7"]) == [score]
    assert reward.compute_score("problems", answer, "2+5=7\n#### 7") == score
    assert reward.correct(["#### 1007"], ["#### 1,007"]) == [1.0]


def test_the_data_and_the_model_are_made_once_and_the_run_is_described(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch, 1)
    config = load_run_config("config.yaml")

    module("prepare").prepare(config)
    made = {path: path.stat().st_mtime_ns for path in here.rglob("*") if path.is_file()}
    module("prepare").prepare(config)

    assert made == {path: path.stat().st_mtime_ns for path in here.rglob("*") if path.is_file()}
    rows = [json.loads(line) for line in Path("problems.jsonl").read_text().splitlines()]
    assert len({row["question"] for row in rows}) == len(rows) == 6000
    assert module("reward").correct([row["answer"] for row in rows], [row["answer"] for row in rows]) == [1.0] * 6000
    assert "SinkTrainer" in describe_run(config)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("override", ["data.path=gsm8k/trian.jsonl", "model.path=Qwen2.5"])
def test_nothing_is_made_at_a_path_of_the_user(override: str, here: Path) -> None:
    with pytest.raises(InvalidConfig, match=override.partition("=")[2]):
        anyio.run(train, load_run_config("config.yaml", [override]))

    assert not (here / override.partition("=")[2]).exists()


@pytest.mark.long
@pytest.mark.usefixtures("here")
def test_the_run_trains_with_each_form_of_the_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, 40)
    for name, function in {
        "trl": '{function: "reward:correct", kind: trl}',
        "verl": '{function: "reward:compute_score", kind: verl}',
    }.items():
        overrides = [f"reward.functions=[{function}]", "algorithm.steps=2", f"folder=runs/{name}"]

        summary = anyio.run(train, load_run_config("config.yaml", overrides))

        assert summary.ledger["ended"]["trained"] == 2 * 64 * 8
