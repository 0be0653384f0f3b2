"""The processes of a round as the driver sees them: started, struck, started anew when killed, and awaited."""

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

__all__ = ["Actor", "Cast", "children_of", "left_of"]

ROOT = Path(__file__).parents[1]

START = "from chaos.actors import main; main()"

STOPPED_S = 4.0
"""How long a process is stopped at most: twice as long as its peers bear its silence."""


def children_of(pid: int) -> list[int]:
    """Return the processes that the threads of `pid` started."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, children.read_text().split())
    return found


@dataclass
class Actor:
    """One process after the other, of the same orders: a new one where the last one was killed."""

    name: str
    spec: Spec
    prefix: Sequence[str] = ()
    """Of its command: the network namespace."""
    process: subprocess.Popen[str] | None = None
    deaths: int = 0
    done: bool = False
    """Whether it ended by itself, without an error."""

    def start(self) -> subprocess.Popen[str]:
        """Start the process."""
        orders = msgspec.json.encode(self.spec).decode()
        with (self.spec.folder / f"{self.name}.log").open("a") as log:
            self.process = subprocess.Popen(  # noqa: S603 (this interpreter)
                [*self.prefix, sys.executable, "-c", START, orders],
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
        """Return the process and its children: workers, of a trainer."""
        if self.process is None or self.process.poll() is not None:
            return []
        return [self.process.pid, *children_of(self.process.pid)]


@dataclass
class Cast:
    """All processes of a round, and the blows that they get."""

    random: random.Random
    actors: list[Actor] = field(default_factory=list)
    """Those that are struck."""
    holders: list[Actor] = field(default_factory=list)
    """Those that keep network namespaces."""
    dealt: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def play(self, actor: Actor) -> None:
        """Run an actor to its end, through any number of kills."""
        while not actor.done:
            actor.start()
            status = await actor.end()
            actor.done = status == 0
            actor.deaths += status == -signal.SIGKILL
            if status not in {0, -signal.SIGKILL}:
                self.wrong.append(f"{actor.name} ended with {status}: {actor.tail()}")
                return

    async def strike(self) -> None:
        """Kill or stop one process."""
        blow = self.random.choice(["SIGKILL", "stop"])
        share, stopped_s = self.random.random(), self.random.uniform(0.0, STOPPED_S)
        pids = [pid for actor in self.actors for pid in actor.pids()]
        if not pids:
            return
        with suppress(ProcessLookupError, ChildProcessError):
            pidfd = os.pidfd_open(pids[int(share * len(pids))])
            try:
                await self._deal(pidfd, blow, stopped_s)
            finally:
                os.close(pidfd)

    async def _deal(self, pidfd: int, blow: str, stopped_s: float) -> None:
        self.dealt[blow] += 1
        if blow == "SIGKILL":
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            return
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        try:
            await anyio.sleep(stopped_s)
        finally:
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)

    def kill(self) -> None:
        """End everything that is left of it."""
        for actor in self.actors + self.holders:
            if actor.process is not None and actor.process.poll() is None:
                actor.process.kill()
                actor.process.wait()


def left_of(pids: Iterable[int]) -> list[str]:
    """Return processes that are still there, with their commands; those that have ended are reaped."""
    found = []
    for pid in pids:
        with suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0]:
                continue
        with suppress(FileNotFoundError, ProcessLookupError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            found.append(f"process {pid}: {command[:200]}")
    return found
