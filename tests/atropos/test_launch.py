"""`penstock launch`, with real processes and real signals: what it starts, what it ends, and its exit status."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.atropos.gateways import client, scored
from tests.command_line import ran
from tests.failsafe import FAILSAFE_S
from tests.ports import free_port

SCRIPT = str(Path(__file__).with_name("launched.py"))


def program(kind: str, *numbers: int) -> list[str]:
    return [sys.executable, "-I", "-S", SCRIPT, kind, *map(str, numbers)]


@dataclass
class Launched:
    """A launch, and the lines that it told."""

    process: subprocess.Popen[str]
    folder: Path
    gateway: str
    lines: list[str] = field(default_factory=list)
    pids: dict[str, int] = field(default_factory=dict)
    """Of the programs, by name."""
    output: str = ""
    """That of the trainer."""

    def until(self, name: str) -> None:
        """Read lines until a program is ready."""
        while name not in self.pids:
            self._read(self._line())

    def end(self) -> int:
        """Return its exit status, when it has ended, with every line and the trainer's output."""
        output, errors = self.process.communicate(timeout=FAILSAFE_S)
        self.lines += errors.splitlines()
        self.output = output
        return self.process.returncode

    def told(self, part: str) -> str:
        """Return the line that has this part."""
        (line,) = [line for line in self.lines if part in line]
        return line

    @property
    def families(self) -> list[int]:
        """Return the processes of all programs, and the child of each that has one."""
        logs = [path.read_text() for path in (self.folder / "logs").glob("*.log")]
        return [
            *self.pids.values(),
            *(int(pid) for log in logs for pid in re.findall(r"^pid (\d+)$", log, re.MULTILINE)),
        ]

    def _line(self) -> str:
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        assert line, self.lines
        return line

    def _read(self, line: str) -> None:
        self.lines.append(line.rstrip())
        if found := re.search(r"penstock: (\S+) is ready: pid (\d+)", line):
            self.pids[found[1]] = int(found[2])


@contextmanager
def launched(folder: Path, trainer: list[str], environment: list[str], **more: Any) -> Iterator[Launched]:
    """Launch a gateway at a free port with these programs; kill it after the body, if it still runs."""
    gateway = f"http://127.0.0.1:{free_port()}"
    config = {"gateway": gateway, "trainer": trainer, "environments": {"sums": environment}, **more}
    (folder / "launch.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "penstock", "launch", "launch.yaml"]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield Launched(process, folder, gateway)
        finally:
            process.kill()


@contextmanager
def descriptors(pids: list[int]) -> Iterator[list[int]]:
    """Open descriptors of processes, which never refer to other processes."""
    with ExitStack() as stack:
        opened = [os.pidfd_open(pid) for pid in pids]
        for descriptor in opened:
            stack.callback(os.close, descriptor)
        yield opened


def alive(opened: list[int]) -> list[int]:
    """Return those of processes that have not ended; a process that nobody has waited for yet has."""
    ended, _, _ = select.select(opened, [], [], 0)
    return [descriptor for descriptor in opened if descriptor not in ended]


# -- to the end of the trainer -----------------------------------------------------------------------------------------


def test_each_begins_when_the_one_before_is_ready_and_all_end_with_the_trainer(tmp_path: Path) -> None:
    port = free_port()
    server = {"command": program("server", port), "ready": f"http://127.0.0.1:{port}/health"}
    with launched(tmp_path, program("trainer", 3), program("environment", -1), servers={"model": server}) as launch:
        launch.until("sums")
        with descriptors(launch.families) as opened:
            with client(launch.gateway) as sending:
                sending.post("/scored_data_list", [scored()] * 2)
            assert launch.end() == 0
            assert alive(opened) == []

    assert list(launch.pids) == ["gateway", "model", "trainer", "sums"]
    assert "trained 12" in launch.output
    assert launch.told("exited").endswith("exited with status 0")
    assert launch.told("accepted").endswith("sums_0: 4 sequences accepted = 4 given to the trainer + 0 waiting")


@pytest.mark.long
def test_an_environment_that_has_sent_all_ends_nothing_and_the_status_is_that_of_the_trainer(tmp_path: Path) -> None:
    with launched(tmp_path, program("trainer", 4, 3), program("environment", 4)) as launch:
        assert launch.end() == 3

    assert "trained 16" in launch.output
    assert "exited with status 3" in launch.told("trainer (pid")


# -- kills -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("killed", "status", "last"),
    [
        pytest.param(
            "trainer",
            128 + signal.SIGKILL,
            r"penstock: trainer \(pid \d+\) was killed by SIGKILL",
            marks=pytest.mark.long,
        ),
        pytest.param("sums", 1, r"penstock: sums \(pid \d+\) was killed by SIGKILL", marks=pytest.mark.long),
        ("gateway", 1, r"penstock: gateway \(pid \d+\) was killed by SIGKILL"),
    ],
)
def test_a_program_that_is_killed_is_named_and_ends_all(killed: str, status: int, last: str, tmp_path: Path) -> None:
    with launched(tmp_path, program("trainer", 1000), program("environment", -6)) as launch:
        launch.until("sums")
        with descriptors(launch.families) as opened:
            os.kill(launch.pids[killed], signal.SIGKILL)
            assert launch.end() == status
            assert alive(opened) == []

    told = "\n".join(launch.lines)
    assert re.search(last, told)
    if killed != "trainer":
        log = tmp_path / "logs" / f"{killed}.log"
        assert f"The end of {log}:\n\n{log.read_text().strip()}" in told
        assert "trained" in launch.output  # at SIGTERM it had time to tell
    if killed != "gateway":
        accepted, given, waiting = map(int, re.findall(r"\d+", launch.told("accepted").partition("sums")[2])[-3:])
        assert accepted == given + waiting


@pytest.mark.long
def test_one_that_ends_before_it_has_registered_is_named_with_what_it_printed(tmp_path: Path) -> None:
    environment = [sys.executable, "-I", "-S", "-c", "print('expected a data set, got none')"]
    with launched(tmp_path, program("trainer", 1000), environment) as launch:
        assert launch.end() == 1

    assert launch.told("exited").endswith("exited with status 0")
    assert "expected a data set, got none" in launch.lines


@pytest.mark.parametrize(
    "number",
    [signal.SIGHUP, *(pytest.param(other, marks=pytest.mark.long) for other in (signal.SIGINT, signal.SIGTERM))],
)
def test_a_signal_ends_all_and_the_status_is_that_of_the_trainer(number: signal.Signals, tmp_path: Path) -> None:
    with launched(tmp_path, program("trainer", 1000), program("environment", -3)) as launch:
        launch.until("sums")
        with descriptors(launch.families) as opened:
            launch.process.send_signal(number)
            assert launch.end() == 0
            assert alive(opened) == []

    assert launch.told(number.name)
    assert "trained" in launch.output


def test_a_launcher_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    with launched(tmp_path, program("trainer", 1000), program("environment", -3)) as launch:
        launch.until("sums")
        with descriptors(launch.families) as opened:
            launch.process.kill()
            for descriptor in opened:
                select.select([descriptor], [], [], FAILSAFE_S)
            assert alive(opened) == []


# -- mistakes ----------------------------------------------------------------------------------------------------------

LEAST: dict[str, Any] = {"trainer": "python train.py", "environments": {"sums": "python sums.py serve"}}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"trainer": ""}, "trainer: expected a program and its arguments, got ''"),
        ({"trainer": "python 'train.py"}, "trainer: expected a program and its arguments, got .*No closing quotation"),
        ({"environments": {}}, "environments: expected at least one, got none"),
        ({"environments": {"sums": []}}, r"environments\.sums: expected a program and its arguments, got \[\]"),
        ({"environments": {"trainer": "a"}}, "expected one name for each, without / and other than .*, got trainer"),
        ({"environments": {"a/b": "a"}}, "expected one name for each, without / .*, got a/b"),
        ({"gateway": "https://127.0.0.1:8000"}, "gateway: expected http://host:port, got 'https://127.0.0.1:8000'"),
        ({"servers": {"model": {"command": "a", "ready": "9001"}}}, "expected one that begins with http://"),
        ({"servers": {"sums": {"command": "a", "ready": "http://a:1/"}}}, "expected one name for each.*, got sums"),
        ({"ready_timeout_s": 0}, "ready_timeout_s: expected"),
        ({"environment": {"sums": "a"}}, "did you mean 'environments'?"),
    ],
)
def test_a_mistake_in_the_file_is_named(wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "launch.yaml").write_text(json.dumps(LEAST | wrong))

    status, printed = ran("launch", tmp_path / "launch.yaml")

    assert status == 1
    assert re.match(f"penstock: .*{message}", printed)
