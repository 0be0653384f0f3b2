"""`penstock top`, on a terminal and without one, while a run goes on, when it is killed, and when it has ended."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests.commands.waiting_run import PENSTOCK, finish, printed, printed_behind, waiting_run
from tests.namespaces import read_only
from tests.pipeline.view.watched import MEMORY_HERE
from tests.terminals import open_terminal


def read_until(master: int, text: str, seen: str = "") -> str:
    """Read from a terminal until `text` has been drawn."""
    while text not in seen:
        seen += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", os.read(master, 65_536).decode(errors="replace"))
    return seen


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def test_a_run_is_shown_from_another_terminal_and_its_death_too(tmp_path: Path) -> None:
    master, slave = open_terminal()
    with waiting_run(tmp_path, steps=6) as run:
        environment = os.environ | {"COLUMNS": "160", "TERM": "xterm-256color"}
        top = subprocess.Popen([*PENSTOCK, "top", str(tmp_path)], stdout=slave, stderr=slave, env=environment)
        os.close(slave)
        begun = read_until(master, "step 6/12")
        shown = read_until(master, "\r\nruns", begun[begun.index("step 6/12") :])
        run.kill()
        after = read_until(master, "start it again to continue it")

    assert top.wait() == 1
    os.close(master)
    for part in ("step ", "accuracy", "0.75", "SinkTrainer", "begun"):
        assert part in shown
    assert MEMORY_HERE.search(shown)
    assert "died: its process is gone" in after


def test_without_a_terminal_it_is_shown_once_and_only_read(tmp_path: Path) -> None:
    with waiting_run(tmp_path, steps=6) as run:
        before = files_in(tmp_path)
        shown = printed_behind(read_only(tmp_path), "top", tmp_path)
        assert run.poll() is None
        after = files_in(tmp_path)
    died = printed("top", tmp_path, status=1)
    finish(tmp_path)
    ended = printed("top", tmp_path)

    assert "\nruns" in shown
    assert {path for path in after if not path.endswith(".unfinished")} <= before
    assert died.endswith("\ndied: its process is gone, and this is its last view; start it again to continue it\n")
    assert ended.startswith("step 12/12 ")
    assert "best of step 12" in ended
    assert ended.endswith("\nended: SinkTrainer returned\n")


def test_a_folder_without_a_run_is_an_error_that_says_which_folder_to_give(tmp_path: Path) -> None:
    assert "expected the folder of a run, with view.json, got " in printed("top", tmp_path, status=1)
    assert "expected the folder of a run" in printed("top", tmp_path / "absent", status=1)
