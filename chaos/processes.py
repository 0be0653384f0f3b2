"""The processes of a round in the driver: start them, inject faults, restart killed ones, and wait for their ends."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import msgspec

from .actors import Spec
from .relay import BitFlips

__all__ = ["Actor", "RoundProcesses", "Wire", "children_of", "left_of"]

ROOT = Path(__file__).parents[1]

START = "from chaos.actors import main; main()"

FLIPS = 0.7
"""The share of flips among the faults on the wire."""

STOPPED_S = 4.0
"""Most seconds that a process is stopped: twice the heartbeat timeout of its peers."""


def children_of(pid: int) -> list[int]:
    """Return the processes that the threads of `pid` started."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, children.read_text().split())
    return found


@dataclass
class Actor:
    """A sequence of processes with one configuration: a new one when the last one was killed."""

    name: str
    spec: Spec
    prefix: Sequence[str] = ()
    """Prefix of its command, for its network namespace."""
    process: subprocess.Popen[str] | None = None
    deaths: int = 0
    done: bool = False
    """True once it has ended by itself, without an error."""

    def start(self) -> subprocess.Popen[str]:
        """Start the process."""
        config = msgspec.json.encode(self.spec).decode()
        with (self.spec.folder / f"{self.name}.log").open("a") as log:
            self.process = subprocess.Popen(  # noqa: S603 (this interpreter)
                [*self.prefix, sys.executable, "-c", START, config],
                stdout=subprocess.PIPE if self.spec.role == "holder" else log,
                stderr=log,
                text=True,
                cwd=ROOT,
                process_group=0,
                env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OPENBLAS_NUM_THREADS": "1"},
            )
        return self.process

    async def end(self) -> int:
        """Wait until the process has ended, and return its status."""
        assert self.process is not None  # noqa: S101 (it was started)
        pidfd = os.pidfd_open(self.process.pid)
        try:
            await anyio.wait_readable(pidfd)
        finally:
            os.close(pidfd)
        return self.process.wait()

    def tail(self) -> str:
        """Return the last lines that its processes printed."""
        lines = (self.spec.folder / f"{self.name}.log").read_text().splitlines()
        return "\n".join(lines[-40:])

    def pids(self) -> list[int]:
        """Return the ids of the process and its children, such as the workers of a trainer."""
        if self.process is None or self.process.poll() is not None:
            return []
        return [self.process.pid, *children_of(self.process.pid)]


@dataclass(frozen=True)
class Wire:
    """The relay between senders and a trainer, and a flood of the trainer itself."""

    flips: BitFlips
    flooded: Spec
    """The configuration of the trainer, whose port is flooded."""
    port: int
    """The relay's port."""


@dataclass
class RoundProcesses:
    """All processes of a round, and the faults that were injected."""

    random: random.Random
    actors: list[Actor] = field(default_factory=list)
    """Processes that get faults."""
    holders: list[Actor] = field(default_factory=list)
    """Processes that hold network namespaces, and flooders."""
    wire: Wire | None = None
    """The wire between the processes, which can be disturbed."""
    injected: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def run(self, actor: Actor) -> None:
        """Run an actor to its end, through any number of kills."""
        while not actor.done:
            actor.start()
            status = await actor.end()
            actor.done = status == 0
            actor.deaths += status == -signal.SIGKILL
            if status not in {0, -signal.SIGKILL}:
                self.wrong.append(f"{actor.name} ended with {status}: {actor.tail()}")
                return

    async def inject_fault(self) -> None:
        """Kill or stop one process."""
        fault = self.random.choice(["SIGKILL", "stop"])
        share, stopped_s = self.random.random(), self.random.uniform(0.0, STOPPED_S)
        pids = [pid for actor in self.actors for pid in actor.pids()]
        if not pids:
            return
        with suppress(ProcessLookupError, ChildProcessError):
            pidfd = os.pidfd_open(pids[int(share * len(pids))])
            try:
                await self._inject(pidfd, fault, stopped_s)
            finally:
                os.close(pidfd)

    async def disturb(self, wire: Wire) -> None:
        """Flip a bit of what is sent next, or flood the trainer once."""
        if self.random.random() < FLIPS:
            self.injected["flip"] += 1
            wire.flips.due = True
            return
        self.injected["flood"] += 1
        number = self.injected["flood"]
        flooder = Actor("flooder", msgspec.structs.replace(wire.flooded, role="flooder", lane=number))
        self.holders.append(flooder)
        flooder.start()
        if (status := await flooder.end()) != -signal.SIGKILL:
            self.wrong.append(f"flooder ended with {status}: {flooder.tail()}")

    async def _inject(self, pidfd: int, fault: str, stopped_s: float) -> None:
        self.injected[fault] += 1
        if fault == "SIGKILL":
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            return
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        try:
            await anyio.sleep(stopped_s)
        finally:
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)

    def kill(self) -> None:
        """Kill all processes that still run."""
        for actor in self.actors + self.holders:
            if actor.process is not None and actor.process.poll() is None:
                actor.process.kill()
                actor.process.wait()


def left_of(pids: Iterable[int]) -> list[str]:
    """Return the processes among `pids` that still exist, with their commands; reap those that have ended."""
    found = []
    for pid in pids:
        with suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0]:
                continue
        with suppress(FileNotFoundError, ProcessLookupError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            found.append(f"process {pid}: {command[:200]}")
    return found
