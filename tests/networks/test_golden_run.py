"""The example that trains on arithmetic, over three hosts, with a kill of each kind; takes about seven minutes."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from chaos.network import within
from tests.networks.network import Host, Network, network

EXAMPLE = Path(__file__).parents[2] / "examples" / "gsm8k"
COMMAND = [sys.executable, "-c", "from penstock._cli.app import main; main()"]
STEPS, TRAJECTORIES = 150, 64 * 8

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


class Run:
    """The commands of a run, on the hosts of a network; those of one host share no memory, as in containers."""

    def __init__(self, folder: Path, trainer: Host, stack: ExitStack) -> None:
        self.folder = folder
        self._trainer = trainer
        self._stack = stack
        self._values = ["seed=0", "folder=run"]
        self._key = str(folder / "run.key")

    def train(self) -> subprocess.Popen[bytes]:
        placement = f"placement={{samplers: 2, joining: {{key: {self._key}}}}}"
        return self._start(self._trainer, "run", "config.yaml", *self._values, placement)

    def sample(self, host: Host) -> subprocess.Popen[bytes]:
        url = f"tcp://{self._trainer.address}:5555"
        return self._start(host, "worker", "--join", url, "--key", self._key, "config.yaml", *self._values)

    def _start(self, host: Host, *arguments: str) -> subprocess.Popen[bytes]:
        alone = [*within(host.pid), "unshare", "--mount"]
        process = self._stack.enter_context(subprocess.Popen([*alone, *COMMAND, *arguments], cwd=self.folder))
        self._stack.callback(process.kill)
        return process

    def metrics(self) -> list[dict[str, Any]]:
        """Return what was written for each step."""
        path = self.folder / "run" / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def until(self, step: int, training: subprocess.Popen[bytes]) -> None:
        """Wait until a step is done."""
        while not any(line["step"] >= step for line in self.metrics()):
            assert training.poll() is None
            time.sleep(0.2)


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Network]:
    with network(tmp_path) as made:
        yield made


def test_a_run_over_three_hosts_learns_in_spite_of_a_kill_of_each_kind(net: Network, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, folder := tmp_path / "example")
    trainer, one, two = net.host(), net.host(), net.host()
    with ExitStack() as stack:
        run = Run(folder, trainer, stack)
        training, first, second = run.train(), run.sample(one), run.sample(two)

        # 1. A worker is asked to stop, as before a spot machine goes, and another one comes.
        run.until(10, training)
        second.send_signal(signal.SIGTERM)
        assert second.wait() == 0
        second = run.sample(two)

        # 2. A worker is killed.
        run.until(25, training)
        first.kill()
        first = run.sample(one)

        # 3. A link is cut for seconds.
        run.until(40, training)
        net.cut(two)
        time.sleep(6)
        net.restore(two)

        # 4. The run is killed, and started again: it resumes from its checkpoint, and the workers come back.
        run.until(60, training)
        training.kill()
        training.wait()
        training = run.train()

        # 5. A host is gone without a word, and back before the end.
        run.until(85, training)
        net.cut(two)
        run.until(100, training)
        net.restore(two)
        codes = [training.wait(), first.wait(), second.wait()]

    assert codes == [0, 0, 0]
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["accuracy_after"] > 2 * summary["accuracy_before"]
    steps = [line["step"] for line in run.metrics() if "loss" in line]
    assert steps == list(range(1, STEPS + 1))  # the evaluation after the last one has a line of its own
    ledger = summary["ledger"]
    assert ledger["ended"]["stale"] == ledger["in_flight"] == 0
    assert ledger["admitted"] == sum(ledger["ended"].values())
    assert ledger["ended"]["trained"] % TRAJECTORIES == 0
