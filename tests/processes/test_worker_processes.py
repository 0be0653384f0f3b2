"""The processes of penstock by their commands, and their end where the parent is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.worker_processes import worker_processes

from penstock._pipeline.workers.worker_payload import interpreter_command


def test_only_what_runs_a_worker_counts_as_one(tmp_path: Path) -> None:
    (folder := tmp_path / "penstock").mkdir()
    (folder / "script.py").write_text("input()")

    with subprocess.Popen([sys.executable, str(folder / "script.py")], stdin=subprocess.PIPE) as other:
        assert worker_processes() == []
        command = interpreter_command("penstock.errors", "unused")
        code = command.index("-c") + 1
        command[code] = command[code].replace("import main; main(sys.argv[1])", "import PenstockError; input()")
        command.insert(1, "-B")  # an interpreter with this flag is started as it is: a fork would have another command
        with subprocess.Popen(command, stdin=subprocess.PIPE) as worker:
            assert worker_processes() == [worker.pid]
            worker.communicate(b"\n")
        other.communicate(b"\n")


def test_a_process_whose_reply_nobody_reads_ends_silently() -> None:
    command = interpreter_command("penstock._stages.rewards.pattern_process", str(os.getpid()))
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as answers:
        assert answers.stdout is not None
        answers.stdout.readline()
        answers.stdout.close()
        answers.stdout = None
        _, printed = answers.communicate(b'["x", "x"]\n')

    assert (answers.returncode, printed) == (0, b"")
