from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from tests.command_line import ran

from penstock.trackers import Jsonl, RunInfo, Sample

STEPS_A_FILE = 3


def sample(step: int, text: str = "x") -> Sample:
    return Sample(
        step=step,
        kind="best",
        rank=1,
        env="env",
        instance_id="0",
        repetition=0,
        prompt="?",
        completion=text,
        completion_tokens=1,
        reward=1.0,
        parts={"format": 0.5},
        advantage=None,
        stop_reason="stop",
        policy_version=step - 1,
    )


def started(folder: Path, step: int = 0) -> Jsonl:
    jsonl = Jsonl()
    jsonl.start(RunInfo(name="run", folder=folder, step=step, config={"lr": 0.5}))
    return jsonl


def write(jsonl: Jsonl, first: int, last: int) -> None:
    for step in range(first, last + 1):
        jsonl.log({"reward": 0.5}, step)
        jsonl.samples([sample(step)], step)


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotate files after `STEPS_A_FILE` lines."""
    monkeypatch.setattr(
        "penstock._pipeline.trackers.rotated_lines.ROTATE_BYTES", STEPS_A_FILE * len(msgspec.json.encode(sample(1)))
    )


def steps_in(path: Path) -> list[int]:
    return [msgspec.json.decode(line)["step"] for line in path.read_bytes().splitlines()]


@pytest.mark.usefixtures("small_files")
def test_a_file_that_is_full_is_rotated_and_the_oldest_one_is_removed(tmp_path: Path) -> None:
    write(started(tmp_path), 1, 20)

    files = {path.name: steps_in(path) for path in tmp_path.glob("samples*")}
    assert files == {
        "samples.jsonl": [19, 20],
        "samples.jsonl.1": [16, 17, 18],
        "samples.jsonl.2": [13, 14, 15],
        "samples.jsonl.3": [10, 11, 12],
        "samples.jsonl.4": [7, 8, 9],
    }
    assert steps_in(tmp_path / "metrics.jsonl") == list(range(1, 21))


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("step", [5, 6, 8])
def test_a_run_that_goes_on_writes_the_samples_of_no_step_twice(tmp_path: Path, step: int) -> None:
    write(started(tmp_path), 1, 8)

    write(started(tmp_path, step), step + 1, 10)

    written = [step for end in (".3", ".2", ".1", "") for step in _steps(tmp_path / f"samples.jsonl{end}")]
    assert written == list(range(1, 11))


def _steps(path: Path) -> list[int]:
    return steps_in(path) if path.exists() else []


@pytest.mark.usefixtures("small_files")
def test_samples_of_any_step_are_found_in_every_file(tmp_path: Path) -> None:
    write(started(tmp_path), 1, 9)

    assert [shown(tmp_path, "--step", step) for step in (1, 6, 9)] == [[1], [6], [9]]
    assert shown(tmp_path) == [9]
    status, printed = ran("samples", tmp_path, "--step", 10)
    assert status == 1
    assert printed.endswith("1, 2, 3, …, 7, 8, 9, got 10\n")


def shown(folder: Path, *step: object) -> list[int]:
    """Return the steps of the samples that `penstock samples` prints."""
    status, printed = ran("samples", folder, *step)
    assert status == 0
    return [int(step) for step in re.findall(r"^step (\d+), best 1: ", printed, re.MULTILINE)]


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    write(started(tmp_path), 1, 2)
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(sample(3))[:-5])

    assert shown(tmp_path) == [2]


def test_hyper_parameters_are_written_beside_them(tmp_path: Path) -> None:
    started(tmp_path)

    assert msgspec.json.decode((tmp_path / "config.json").read_bytes()) == {"lr": 0.5}


def test_a_folder_of_its_own_is_continued_whatever_the_run(tmp_path: Path) -> None:
    for step in (1, 2):
        jsonl = Jsonl(tmp_path)
        jsonl.start(RunInfo(name="run"))
        write(jsonl, step, step)

    assert steps_in(tmp_path / "metrics.jsonl") == steps_in(tmp_path / "samples.jsonl") == [1, 2]
