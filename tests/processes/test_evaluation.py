"""Two workers evaluate their shares: their parts become one result, also where one of them dies in the middle."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.stages.sampling.runs import SAMPLED, Counts, Sums, evaluation, pipeline, ran

from penstock import processes
from penstock.trackers import Jsonl, Samples
from penstock.training import write_checkpoint

FIVE = 5


@dataclass(frozen=True)
class Deadly(Sums):
    """Kills its process at the first score of its last question."""

    marker: str = ""

    def score_answer(self, answer: str, entry: Mapping[str, Any]) -> float:
        if entry["question"] == f"{self.first + self.count - 1}+1=" and not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().score_answer(answer, entry)


@pytest.mark.parametrize("max_lag", [0, pytest.param(1, marks=pytest.mark.long)])
async def test_the_parts_of_two_workers_are_merged_to_what_one_process_finds_and_the_ledger_is_as_without_them(
    max_lag: int,
) -> None:
    of_two, balance = await ran(pipeline(evaluation(**SAMPLED), on=processes(2), max_lag=max_lag))
    of_one, _ = await ran(pipeline(evaluation(**SAMPLED)))

    assert {0, 4} <= set(of_two.evaluations) <= {0, 2, 4}
    assert all(metrics == pytest.approx(of_one.evaluations[0]) for metrics in of_two.evaluations.values())
    assert balance["ended"]["trained"] == 4 * 4 * 2
    assert balance["ended"]["failed"] == balance["ended"]["rejected"] == 0


async def test_a_worker_that_dies_in_an_evaluation_repeats_its_part(tmp_path: Path) -> None:
    deadly = partial(Deadly, 100, 5, str(tmp_path / "died"))

    run = pipeline(evaluation(deadly), on=processes(2, restarts=1), samples=Samples(every=100))

    lines, _ = await ran(run, trackers=[Jsonl(tmp_path)])

    assert (tmp_path / "died").exists()
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_bytes().splitlines()]
    assert [each["prompt"] for each in samples if each["evaluated"] == 0] == [
        "100+1=", "101+1=", "103+1=", "102+1=", "104+1="
    ]  # fmt: skip
    assert lines.evaluations[0]["eval/sums/mean@1"] == 0.8
    assert lines.evaluations[0]["eval/sums/missing"] == 0


@dataclass(frozen=True)
class Counted(Sums):
    """Writes each of its scores down."""

    scores: str = ""

    def score_answer(self, answer: str, entry: Mapping[str, Any]) -> float:
        with Path(self.scores).open("a") as file:
            file.write(entry["question"] + "\n")
        return super().score_answer(answer, entry)


async def test_a_worker_that_dies_in_training_evaluates_no_step_again(tmp_path: Path) -> None:
    deadly = partial(Deadly, 0, 10, str(tmp_path / "died"))
    counted = evaluation(partial(Counted, 100, FIVE, str(tmp_path / "scores")), every=4)

    lines, balance = await ran(pipeline(counted, make_env=deadly, on=processes(1, restarts=1)))

    assert (tmp_path / "died").exists()
    assert balance["ended"]["lost"] == 0
    assert sorted(lines.evaluations) == [0, 4]
    assert len((tmp_path / "scores").read_text().splitlines()) == 2 * FIVE


class Kept(Counts):
    """A trainer that resumes its count of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.committed: Mapping[Any, int] = {}

    @property
    def steps(self) -> int:
        return len(self.batches)

    def keep(self, state: Mapping[str, Any]) -> None:
        """Keep nothing: no stage has state."""

    def save(self, folder: Path, _: Any) -> Path:
        return write_checkpoint(folder, self.steps, lambda path: (path / "empty").touch())

    def resume(self, checkpoint: Path) -> None:
        self.batches = [[]] * int(checkpoint.name.rpartition("-")[2])


async def test_a_run_that_resumes_takes_no_evaluation_of_an_earlier_step(tmp_path: Path) -> None:
    folder, scores, died = tmp_path / "run", tmp_path / "scores", tmp_path / "died"
    counted = evaluation(partial(Counted, 100, FIVE, str(scores)), every=4)
    deadly = partial(Deadly, 0, 6, str(died))
    died.touch()
    await ran(pipeline(counted, make_env=deadly, trainer=Kept(), steps=2), folder)
    scores.unlink()
    died.unlink()

    resumed = pipeline(counted, make_env=deadly, on=processes(1, restarts=1), trainer=Kept())
    lines, _ = await ran(resumed, folder)

    assert died.exists()
    assert sorted(lines.evaluations) == [4]
    assert len(scores.read_text().splitlines()) == FIVE
