"""The examples of agents train, each by its configuration."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from penstock.chat import parse_turn
from penstock.runs import describe_run, load_run_config, train

FOLDER = Path(__file__).parent.parent.parent / "examples" / "agents"

SMALL = ["algorithm.steps=1", "algorithm.prompts=2", "algorithm.group_size=2", "evaluation=null"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the files of the examples, which is the current one."""
    shutil.copytree(FOLDER, folder := tmp_path / "agents", ignore=shutil.ignore_patterns("runs", "model", "*.jsonl"))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    for name in ("prepare", "calculator", "debate"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


@pytest.mark.usefixtures("here")
def test_a_call_of_the_calculator_is_a_letter_and_a_digit() -> None:
    calculator: Any = importlib.import_module("calculator")

    (call,) = parse_turn("d4", calculator.calls, tools=calculator.TOOLS).calls

    assert (call.name, call.arguments) == ("double", {"n": 4})
    assert not parse_turn("dd", calculator.calls, tools=calculator.TOOLS).calls
    assert all(row["answer"] == str(eval_of(row["question"])) for row in calculator.rows())


def eval_of(question: str) -> int:
    n = int(question[1])
    return {"d": n + n, "n": n + 1, "s": n**2}[question[0]]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("example", "sequences"), [("calculator", 1), ("debate", 2)])
def test_the_model_and_the_rows_are_made_once_and_a_rollout_is_described(example: str, sequences: int) -> None:
    config = load_run_config(f"{example}.yaml")
    prepare: Any = importlib.import_module("prepare")

    prepare.prepare(config)
    made = {path: path.stat().st_mtime_ns for path in [Path(config.data.path), *Path(config.model.path).iterdir()]}
    prepare.prepare(config)

    assert made == {path: path.stat().st_mtime_ns for path in made}
    assert f"in {sequences} sequences" in describe_run(config)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("example", ["calculator", pytest.param("debate", marks=pytest.mark.long)])
def test_an_example_trains(example: str) -> None:
    assert anyio.run(train, load_run_config(f"{example}.yaml", SMALL)).steps == 1
