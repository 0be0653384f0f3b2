"""An evaluation changes no weight, and a run that is killed in the middle of one comes to the same, once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.resumption.script_of_evaluation import EVERY, KILLED, QUESTIONS, SAMPLES, STEPS
from tests.resumption.test_resumption import made_by, metrics_of, weights_of_step


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with all runs of one process."""
    return made_by("script_of_evaluation", tmp_path_factory.mktemp("runs"))


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def evaluations_of(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of each evaluation, in order."""
    found = [{name: line[name] for name in line if name.startswith("eval/")} for line in metrics_of(folder)]
    return [each for each in found if each]


def test_weights_are_those_of_a_run_that_does_not_evaluate(runs: Path) -> None:
    assert weights_of_step(runs / "whole", STEPS) == weights_of_step(runs / "without", STEPS)


def test_every_step_that_is_due_is_evaluated_once_with_its_own_weights(runs: Path) -> None:
    evaluations = evaluations_of(runs / "whole")

    assert [each["eval/step"] for each in evaluations] == list(range(0, STEPS + 1, EVERY))
    assert len({each["eval/digits/reward"] for each in evaluations}) > 1


@pytest.mark.parametrize("name", KILLED)
def test_a_run_that_is_killed_in_an_evaluation_repeats_it_and_comes_to_the_same(runs: Path, name: str) -> None:
    assert evaluations_of(runs / name) == evaluations_of(runs / "whole")
    assert weights_of_step(runs / name, STEPS) == weights_of_step(runs / "whole", STEPS)


@pytest.mark.parametrize("name", KILLED)
def test_the_samples_of_each_evaluation_are_written_once_also_where_a_run_is_killed_in_one(
    runs: Path, name: str
) -> None:
    whole, killed = (lines_of(runs / folder / "samples.jsonl") for folder in ("whole", name))

    assert killed == whole
    found = [sample["evaluated"] for sample in killed if sample["evaluated"] is not None]
    assert found == [step for step in range(0, STEPS + 1, EVERY) for _ in range(QUESTIONS * SAMPLES)]


@pytest.mark.parametrize("name", ["whole", *KILLED])
def test_the_best_checkpoint_is_kept_beside_the_last(runs: Path, name: str) -> None:
    folder = runs / name / "checkpoints"
    trained = evaluations_of(runs / name)[1:]
    best = max(trained, key=lambda each: each["eval/digits/reward"])
    step = int(best["eval/step"])

    assert (folder / "best").readlink() == Path(f"step-{step:08d}")
    assert (
        json.loads((folder / "best.json").read_bytes()).items()
        > {
            "metric": "eval/digits/reward",
            "value": best["eval/digits/reward"],
            "step": step,
            "evaluated": STEPS,
        }.items()
    )
    assert {path.name for path in folder.glob("step-*")} == {f"step-{each:08d}" for each in (step, STEPS)}
