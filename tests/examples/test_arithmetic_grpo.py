"""The demo as its user runs it: once to its end, and interrupted at many moments by Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.cells import cells
from tests.failsafe import FAILSAFE_S

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SCRIPT = EXAMPLES / "arithmetic_grpo.py"


def shorter(*, steps: int, sequences: int = 512, warm_up: int = 400) -> str:
    """Return the script with fewer and smaller steps, and with penstock's events on stderr."""
    return f"""
import logging, sys
from pathlib import Path
logging.basicConfig(level=logging.INFO)
sys.argv, sys.path = ["arithmetic_grpo.py", *sys.argv[1:]], [{str(EXAMPLES)!r}, *sys.path]
from arithmetic.warm_up import warm_up
warm_up.__defaults__ = ({warm_up},)
source = Path({str(SCRIPT)!r}).read_text()
for name, full, little in ("START_TIMEOUT_S = ", 250, {steps}), ("sequences=", 512, {sequences}):
    assert f"{{name}}{{full}}," in source
    source = source.replace(f"{{name}}{{full}},", f"{{name}}{{little}},")
exec(compile(source, {str(SCRIPT)!r}, "exec"), {{"__name__": "__main__", "__file__": {str(SCRIPT)!r}}})
"""


SHORTEST = shorter(steps=12, sequences=64, warm_up=60)
"""A warm-up of a second, and twelve small steps of reinforcement."""

FILES = {"metrics.jsonl", "reward.png", "weights.safetensors", "summary.json"}


def named_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("*penstock*")}  # noqa: S108 (looked at, not written)


def session(leader: int) -> list[int]:
    """Return the live processes of a session."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of = path.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(of) == leader and state != "Z":
            found.append(int(path.parent.name))
    return found


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start the demo in `folder`, in a session of its own, as on a terminal."""
    command = [sys.executable, "-u", *arguments]
    environment = os.environ | {"COLUMNS": "140"}
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as demo:
        try:
            yield demo
        finally:
            demo.kill()  # not needed; its workers die with it


def read_until(demo: subprocess.Popen[str], marker: str) -> None:
    assert demo.stdout is not None
    read: list[str] = []
    for line in demo.stdout:
        read.append(line)
        if re.search(marker, line):
            return
    raise AssertionError("".join(read))


def kept(folder: Path) -> dict[str, Any]:
    """Return the summary of the latest run, whose folder is complete."""
    latest = folder / "runs" / "latest"
    assert {path.name for path in latest.iterdir()} == FILES
    summary: dict[str, Any] = json.loads((latest / "summary.json").read_text())
    ledger = summary["ledger"]
    assert ledger["admitted"] == ledger["in_flight"] + sum(ledger["ended"].values())
    return summary


def interrupted(demo: subprocess.Popen[str], status: int = 130) -> str:
    """Interrupt the demo with Ctrl-C, and return its output; it ends without an error."""
    os.killpg(demo.pid, signal.SIGINT)
    rest, _ = demo.communicate(timeout=FAILSAFE_S)
    assert demo.returncode == status
    assert "Traceback" not in rest
    assert "ignored" not in rest
    assert session(demo.pid) == []
    return rest


@pytest.fixture
def _memory_is_left_as_it_was() -> Iterator[None]:
    """Assert that no file is left; files of other tests appear and vanish meanwhile."""
    before = named_memory()
    yield
    deadline = time.monotonic() + FAILSAFE_S
    while (left := named_memory() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


@pytest.mark.usefixtures("_memory_is_left_as_it_was")
@pytest.mark.parametrize("imported", cells(["argparse", "numpy", "torch", "reasoning_gym"], run=["argparse"]))
def test_ctrl_c_while_python_imports_ends_the_demo_at_once(imported: str, tmp_path: Path) -> None:
    with started(tmp_path, "-X", "importtime", str(SCRIPT)) as demo:
        read_until(demo, rf"\| +{imported}$")

        interrupted(demo, status=-signal.SIGINT)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_memory_is_left_as_it_was")
@pytest.mark.long
@pytest.mark.parametrize("moment", ["warming up", "reinforcement from", "worker_started", r"step \d+/\d+, "])
def test_ctrl_c_ends_the_demo_and_leaves_nothing(moment: str, tmp_path: Path) -> None:
    with started(tmp_path, "-c", SHORTEST) as demo:
        read_until(demo, moment)

        rest = interrupted(demo)

    assert "kept in runs/" in rest
    assert kept(tmp_path)["stop_reason"] == "interrupted"


@pytest.mark.long
@pytest.mark.usefixtures("_memory_is_left_as_it_was")
def test_ctrl_c_while_the_results_are_written_leaves_them_whole(tmp_path: Path) -> None:
    with started(tmp_path, "-c", SHORTEST) as demo:
        read_until(demo, "run_ended")

        rest = interrupted(demo)

    assert "kept in runs/" in rest
    assert kept(tmp_path)["stop_reason"] == "all steps done"


@pytest.mark.long
@pytest.mark.usefixtures("_memory_is_left_as_it_was")
def test_a_second_ctrl_c_ends_the_demo_at_once(tmp_path: Path) -> None:
    with started(tmp_path, "-c", SHORTEST) as demo:
        read_until(demo, r"step \d+/\d+, ")
        os.kill(demo.pid, signal.SIGINT)
        read_until(demo, "the run is stopping")

        rest = interrupted(demo)

    assert "SIGINT: ended at once" in rest


@pytest.mark.long
def test_a_demo_without_a_step_fails_with_a_sentence(tmp_path: Path) -> None:
    script = shorter(steps=1, warm_up=1)
    script = script.replace("exec(", "source = source.replace('await reinforce(run)', 'pass'); exec(")
    with started(tmp_path, "-c", script) as demo:
        shown, _ = demo.communicate()

    assert demo.returncode == 1
    assert "expected at least one optimizer step, got none" in shown
    assert kept(tmp_path)["steps"] == 0


@pytest.mark.usefixtures("_memory_is_left_as_it_was")
@pytest.mark.parametrize(
    "script",
    [pytest.param(["-c", SHORTEST], id="small steps"), pytest.param([str(SCRIPT)], id="all")],
)
@pytest.mark.long
def test_the_demo_ends_by_itself_rises_from_a_third_and_accounts_for_every_trajectory(
    script: list[str], tmp_path: Path
) -> None:
    with started(tmp_path, *script, "--seed", "2") as demo:
        shown, _ = demo.communicate()

    assert demo.returncode == 0, shown
    assert session(demo.pid) == []
    summary = kept(tmp_path)
    if script != ["-c", SHORTEST]:  # which is too short to learn
        assert 0.2 < summary["accuracy_before"] < 0.5
        assert summary["accuracy_after"] >= 0.9
    assert summary["seed"] == 2
    assert summary["trajectories"] == summary["ledger"]["ended"]["trained"] > 0
    assert summary["ledger"]["in_flight"] == 0
    steps = [json.loads(line) for line in (tmp_path / "runs" / "latest" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, summary["steps"] + 1))
    assert max(step["staleness/max"] for step in steps) <= 4
