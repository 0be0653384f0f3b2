"""A run is killed by SIGKILL, workers and all, at moments that make a difference, and started again: nothing is trained
twice, and nothing that has passed the journal is lost. The trainer's last checkpoint is the witness.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from tests.journal.script_of_a_run import State

from penstock.training import latest_checkpoint

SCRIPT = Path(__file__).with_name("script_of_a_run.py")

PROMPTS = 120
"""Of the first run: 26 optimizer steps, with a checkpoint after every third. More groups than wait between the
stages, so that files are deleted while it runs."""

MOMENTS = [
    pytest.param("writing", 1, marks=pytest.mark.long),  # half of the first entry is on disk
    ("writing", 33),
    pytest.param("journaled", 1, marks=pytest.mark.long),  # on disk, and on its way to the trainer
    pytest.param("journaled", 31, marks=pytest.mark.long),
    pytest.param("stepping", 1, marks=pytest.mark.long),
    pytest.param("stepped", 1, marks=pytest.mark.long),  # the weights have changed, nothing is committed
    pytest.param("stepped", 8, marks=pytest.mark.long),
    pytest.param("saving", 1, marks=pytest.mark.long),  # committed, in no checkpoint
    ("half saved", 3),
    pytest.param("saved", 1, marks=pytest.mark.long),  # in a checkpoint that was not announced
    pytest.param("saved", 4, marks=pytest.mark.long),
    pytest.param("deleting", 1, marks=pytest.mark.long),  # in a checkpoint, and still in the journal
    pytest.param("deleted", 2, marks=pytest.mark.long),
]
"""The moment at which a run kills itself: an action, and how often it was done before."""


def killed(folder: Path, first: int, last: int, moment: str, nth: int) -> None:
    assert _ran(folder, first, last, moment, nth).returncode == -signal.SIGKILL


def finished(folder: Path, first: int, last: int) -> Counter[int]:
    """Run to the end; return how often each prompt was trained."""
    ran = _ran(folder, first, last, "never", 1)
    assert ran.returncode == 0, ran.stderr
    checkpoint = latest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    return Counter(map(int, msgspec.json.decode((checkpoint / "state").read_bytes(), type=State).trained))


def _ran(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(folder), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def once(prompts: Iterable[int]) -> Counter[int]:
    """Return the expected counts: each prompt is trained once, and every seventh is filtered."""
    return Counter({prompt for prompt in prompts if prompt % 7})


@pytest.mark.parametrize(("moment", "nth"), MOMENTS)
def test_received_records_are_trained_once_by_the_resumed_run(tmp_path: Path, moment: str, nth: int) -> None:
    killed(tmp_path, 0, PROMPTS, moment, nth)
    passed = set(map(int, (tmp_path / "passed").read_text().split())) if (tmp_path / "passed").exists() else set()

    trained = finished(tmp_path, PROMPTS, PROMPTS + 5)

    later = range(PROMPTS, PROMPTS + 5)
    assert trained - once(range(PROMPTS)) == once(later)
    assert once(passed) <= trained
    assert max(trained.values()) == 1


@pytest.mark.long
@pytest.mark.parametrize(("moment", "nth"), MOMENTS[1::6])
def test_a_source_that_begins_from_its_beginning_has_everything_trained_once(
    tmp_path: Path, moment: str, nth: int
) -> None:
    killed(tmp_path, 0, PROMPTS, moment, nth)

    assert finished(tmp_path, 0, PROMPTS) == once(range(PROMPTS))


def test_a_run_that_is_killed_again_and_again_trains_everything_once(tmp_path: Path) -> None:
    for moment, nth in [("stepped", 2), ("writing", 20), ("half saved", 1), ("saved", 2), ("deleted", 1)]:
        killed(tmp_path, 0, PROMPTS, moment, nth)

    assert finished(tmp_path, 0, PROMPTS) == once(range(PROMPTS))
