"""The nets under all tests catch what they are there to catch."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from blockbuster import BlockingError
from tests.warned import strict

import penstock

ROOT = Path(__file__).parents[1]

CONFTEST = Path(__file__).parent / "conftest.py"
"""Copied into a suite of its own, that leaks on purpose."""


async def test_a_blocking_call_from_penstock_code_on_the_event_loop_raises() -> None:
    inside_penstock = str(Path(penstock.__path__[0]) / "pipeline" / "imagined.py")
    blocking = compile("import time; time.sleep(0)", inside_penstock, "exec")

    with pytest.raises(BlockingError, match="sleep"):
        exec(blocking)  # noqa: S102 (code that claims to stand in penstock's folder)


def warn_from(module: str, category: type[Warning]) -> None:
    """Warn as a module of that name would."""
    code = compile("import warnings; warnings.warn('slow', category)", f"{module}.py", "exec")
    exec(code, {"__name__": module, "category": category})  # noqa: S102 (code that claims to be another's)


@pytest.mark.parametrize("module", ["penstock.channels", "tests.stages.batching.test_batcher", "benchmarks.soak"])
def test_a_warning_of_this_project_fails_a_test(module: str) -> None:
    with pytest.raises(RuntimeWarning, match="slow"):
        warn_from(module, RuntimeWarning)


@pytest.mark.parametrize("module", ["torch._dynamo.guards", "uvicorn.config", "transformers"])
def test_a_foreign_module_that_warns_of_itself_fails_none(module: str) -> None:
    with warnings.catch_warnings(record=True, action=None) as warned:
        warn_from(module, RuntimeWarning)

    assert [str(each.message) for each in warned] == ["slow"]


def test_a_leak_fails_a_test_from_any_module() -> None:
    with pytest.raises(ResourceWarning, match="slow"):
        warn_from("asyncio.selector_events", ResourceWarning)


@pytest.mark.parametrize(("module", "status"), [("penstock.channels", 1), ("torch._dynamo.guards", 0)])
def test_so_it_is_in_a_strict_interpreter(module: str, status: int) -> None:
    warns = f"exec('import warnings; warnings.warn(str())', {{'__name__': {module!r}}})"

    ran = subprocess.run([sys.executable, "-c", warns], env=strict(), capture_output=True, text=True, check=False)

    assert (ran.returncode, "UserWarning" in ran.stderr) == (status, bool(status))


LEAKS = {
    "child process": "import subprocess, sys; kept = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=-1)",
    "descriptor": "import os; kept = os.memfd_create('left')",
}


def test_a_test_with_real_processes_that_leaves_something_behind_fails(tmp_path: Path) -> None:
    folder = tmp_path / "processes"
    folder.mkdir()
    impatient = CONFTEST.read_text().replace("REAPING_S = FAILSAFE_S", "REAPING_S = 0")
    (tmp_path / "conftest.py").write_text(impatient)
    for number, leak in enumerate(LEAKS.values()):
        (folder / f"test_leak_{number}.py").write_text(f"def test_leaks():\n    global kept\n    {leak}\n")

    printed = failing(tmp_path)

    assert [f"it left ['{leak}" in printed for leak in LEAKS] == [True, True]


HANGING = """
import signal
import anyio
from penstock import TrajectoryGroup
from penstock.channels import memory_channel

async def test_hangs():
    outbox, inbox = memory_channel[TrajectoryGroup](3)

    async def receive():
        await inbox.receive()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(receive)
        await anyio.wait_all_tasks_blocked()
        signal.raise_signal(signal.SIGALRM)  # the deadline
"""


def test_a_test_that_misses_its_deadline_prints_its_waits(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_hangs.py").write_text(HANGING)

    printed = failing(tmp_path, "--timeout=600")

    assert "what is waited for:" in printed
    assert "capacity=3" in printed
    assert "waiting_for='record'" in printed
    assert "await inbox.receive()" in printed


HANGING_SCRIPT = """
import anyio
from tests.watchdog import tell_when_asked
from penstock import TrajectoryGroup
from penstock.channels import memory_channel

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

    printed = failing(tmp_path, "--timeout=600")

    assert "Timeout" in printed
    assert "capacity=3" in printed
    assert "waiting_for='record'" in printed


def failing(folder: Path, *options: str) -> str:
    """Run the tests in `folder`, of which one fails, and return the output of pytest."""
    command = [sys.executable, "-m", "pytest", "-q", "-o", "anyio_mode=auto", "--rootdir", str(folder)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    ran = subprocess.run(
        [*command, *options, str(folder)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1, ran.stdout
    return ran.stdout
