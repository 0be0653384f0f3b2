"""`penstock samples`, while a run goes on, after it was killed, and when it was continued."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.commands.waiting_run import finish, printed_behind, waiting_run
from tests.commands.waiting_run import printed as printed_by
from tests.namespaces import read_only

from penstock.trackers import Sample


def printed(*arguments: object, status: int = 0) -> str:
    return printed_by("samples", *arguments, status=status)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that has ended."""
    folder = tmp_path_factory.mktemp("ended")
    finish(folder)
    return folder


def headings(text: str) -> list[str]:
    return [line.split(":")[0] for line in text.splitlines() if line.startswith("step ")]


def lines_of(folder: Path) -> list[Sample]:
    return [msgspec.json.decode(line, type=Sample) for line in (folder / "samples.jsonl").read_bytes().splitlines()]


def test_samples_of_a_running_run_are_printed_and_those_of_steps_trained_again_are_written_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    with waiting_run(folder, steps=7) as run:
        last = printed(folder)
        worst = printed(folder, "--worst", 1, "--step", 2)
        assert run.poll() is None
    killed = lines_of(folder)
    finish(folder)

    assert headings(last) == ["step 6, best 1", "step 6, best 2", "step 6, worst 1"]
    assert "reward 5, advantage 1.134" in last
    assert headings(worst) == ["step 2, worst 1"]
    assert "test/1, completion 0, weights of step 0" in worst
    assert sorted({sample.step for sample in killed}) == [1, 2, 4, 6]
    steps = [(sample.step, sample.kind, sample.rank) for sample in lines_of(folder)]
    assert len(set(steps)) == len(steps)
    assert sorted({step for step, _, _ in steps}) == [1, 2, 4, 6, 8, 10, 12]
    assert headings(printed(folder, "--best", 2)) == ["step 12, best 1", "step 12, best 2"]


def test_a_folder_that_cannot_be_written_is_read(ended: Path) -> None:
    shown = printed_behind(read_only(ended), "samples", ended, "--worst", 5)

    assert headings(shown) == ["step 12, worst 1"]


def test_a_step_without_samples_and_a_folder_without_any_are_errors_that_say_what_there_is(
    ended: Path, tmp_path: Path
) -> None:
    refused = printed(ended, "--step", 3, status=1)

    assert "of which" in refused
    assert "1, 2, 4, …, 8, 10, 12, got 3" in refused
    assert printed(tmp_path, status=1).startswith("penstock: expected samples in ")
