"""The nets under all tests catch what they are there to catch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from blockbuster import BlockingError

import penstock

ROOT = Path(__file__).parents[1]

CONFTEST = Path(__file__).parent / "conftest.py"
"""Copied into a suite of its own, that leaks on purpose."""


async def test_a_blocking_call_from_penstock_code_on_the_event_loop_raises() -> None:
    inside_penstock = str(Path(penstock.__path__[0]) / "pipeline" / "imagined.py")
    blocking = compile("import time; time.sleep(0)", inside_penstock, "exec")

    with pytest.raises(BlockingError, match="sleep"):
        exec(blocking)  # noqa: S102 (code that claims to stand in penstock's folder)


LEAKS = {
    "child process": "import subprocess, sys; kept = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=-1)",
    "descriptor": "import os; kept = os.memfd_create('left')",
}


def test_a_test_with_real_processes_that_leaves_something_behind_fails(tmp_path: Path) -> None:
    folder = tmp_path / "processes"
    folder.mkdir()
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    for number, leak in enumerate(LEAKS.values()):
        (folder / f"test_leak_{number}.py").write_text(f"def test_leaks():\n    global kept\n    {leak}\n")

    said = failing(tmp_path)

    assert [f"it left ['{leak}" in said for leak in LEAKS] == [True, True]


HANGING = """
import pytest
from penstock import TrajectoryGroup, memory_channel

@pytest.mark.timeout(0.2)
async def test_hangs():
    outbox, inbox = memory_channel[TrajectoryGroup](3)
    await inbox.receive()
"""


def test_a_test_that_misses_its_deadline_says_what_was_waited_for(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_hangs.py").write_text(HANGING)

    said = failing(tmp_path)

    assert "what is waited for:" in said
    assert "capacity=3" in said
    assert "waiting_for='record'" in said
    assert "await inbox.receive()" in said


HANGING_SCRIPT = """
import anyio
from tests.watchdog import tell_when_asked
from penstock import TrajectoryGroup, memory_channel

async def hang():
    outbox, inbox = memory_channel[TrajectoryGroup](3)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(inbox.receive)
        await anyio.wait_all_tasks_blocked()
        print("it waits", flush=True)

tell_when_asked()
anyio.run(hang)
"""

HANGING_WITH_A_SCRIPT = f"""
import signal
import subprocess
import sys

def test_waits_for_a_script():
    with subprocess.Popen([sys.executable, "-c", {HANGING_SCRIPT!r}], stdout=subprocess.PIPE) as script:
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE):  # was never told of deadlines
            try:
                script.stdout.readline()
                signal.raise_signal(signal.SIGALRM)  # the deadline
            finally:
                script.kill()
"""


def test_so_do_the_scripts_that_it_started(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_script.py").write_text(HANGING_WITH_A_SCRIPT)

    said = failing(tmp_path, "--timeout=50")

    assert "Timeout" in said
    assert "capacity=3" in said
    assert "waiting_for='record'" in said


def failing(folder: Path, *options: str) -> str:
    """What pytest says of tests in `folder`, of which one fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-o", "anyio_mode=auto", "--rootdir", str(folder)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    ran = subprocess.run(
        [*command, *options, str(folder)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1, ran.stdout
    return ran.stdout
