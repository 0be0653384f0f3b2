"""Run one round: start the processes, inject faults for a while, wait until all have ended, and check the result."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import anyio
import msgspec

from penstock import GroupId
from penstock._pipeline.channels.socket_directory import socket_directory
from penstock.channels import ChannelKey

from .actors import Found, Spec, read_trained
from .network import NEAR, Link, LinkNotPossible, apart, within
from .processes import Actor, RoundProcesses, Wire, children_of, left_of
from .records import every_id
from .relay import BitFlips, relayed

__all__ = ["SCENARIOS", "Outcome", "Scenario", "judge", "run_round"]

Scenario: TypeAlias = Literal["workers", "shm", "tcp", "wire", "namespaces"]
"""workers: a pipeline with its sources and a stage in workers · shm, tcp: senders that outlive their trainer · wire: as
tcp, through a relay that flips bits, and peers with the key flood the trainer and die · namespaces: as tcp, the senders
in another network namespace, and the link is set down too. All have a journal."""

SCENARIOS: tuple[Scenario, ...] = ("workers", "shm", "tcp", "wire", "namespaces")

LANES, COUNT = 3, 400
"""Senders, and records of each."""

TRAJECTORIES = 2
"""Trajectories of each record."""

CUTS = 0.4
"""The share of disconnections among faults, where there is a link."""

ON_THE_WIRE = 0.7
"""The share of flips and floods among faults, where there is a relay."""

REMOVE = "import os, shutil, sys; sys.stdin.read()\nwhile os.path.exists(sys.argv[1]): shutil.rmtree(sys.argv[1], True)"
"""Removes a folder when the driver closes its stdin or is killed; processes that die just then may still write."""

REMOVER = REMOVE.partition("\n")[0]
"""Its first line, by which the command of its process is recognised."""

LEAVING_S = 60.0
"""Seconds that a process may still exist after its parent was killed, on a busy machine."""

EVERY_S = 0.8
"""Seconds between two faults, on average."""

CUT_S = 4.0
"""Most seconds that a link is down: twice the heartbeat timeout."""

HUNG_S = 180.0
"""Seconds after the last fault in which all processes must end, or they hang: it takes seconds on an idle machine."""

ALLOWED = "(pid "
"""Part of the reasons of trajectories that may be lost: of those that a worker held when it died, which is named."""


@dataclass(frozen=True)
class Outcome:
    """The result of a round."""

    trained: int
    """Trajectories."""
    lost: int
    """Trajectories that were reported lost, with a worker that died."""
    injected: Counter[str]
    wrong: list[str]


def judge(expected: set[GroupId], trained: Sequence[GroupId], found: Found | None, *, may_lose: bool) -> list[str]:
    """Return descriptions of all errors in the trained records.

    A record may be missing only where the ledger of the run reports it as lost with a worker that died.
    """
    if found is None:
        return ["the trainer left no report"]
    wrong = [f"{each} was trained {count} times" for each, count in Counter(trained).items() if count > 1]
    wrong += [f"{each} was trained and never sent" for each in set(trained) - expected]
    if not found.balanced or found.in_flight:
        wrong.append(f"the ledger's sums do not balance: {found}")
    missing, lost = expected - set(trained), sum(found.lost.values())
    if missing and (not may_lose or 2 * len(missing) > lost):
        wrong.append(f"{len(missing)} records are missing, {lost} trajectories reported lost, as {sorted(missing)[:3]}")
    wrong += [f"lost as {reason!r}" for reason in found.lost if not may_lose or ALLOWED not in reason]
    if found.stop_reason != "end of stream":
        wrong.append(f"the run was ended by {found.stop_reason}")
    return wrong


async def run_round(scenario: Scenario, seed: str, seconds: float) -> Outcome:
    """Run one round, with faults that follow from `seed`, for `seconds`.

    Raises:
        LinkNotPossible: `namespaces` needs a permission that this machine does not give.
    """
    with _folder() as folder:
        processes = RoundProcesses(random.Random(seed))  # noqa: S311 (no secret)
        try:
            link = _configure(processes, scenario, folder)
            await _run_round(processes, link, anyio.Path(folder, "finish"), seconds)
        finally:
            processes.kill()
        return _outcome(processes, scenario, folder)


@contextmanager
def _folder() -> Iterator[Path]:
    """Create a folder for the round and for its sockets within the body."""
    before = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    remover = subprocess.Popen([sys.executable, "-I", "-S", "-c", REMOVE, folder], stdin=subprocess.PIPE)  # noqa: S603
    (folder / "sockets").mkdir()
    os.environ["XDG_RUNTIME_DIR"] = str(folder / "sockets")
    try:
        yield folder
    finally:
        remover.communicate()
        os.environ.pop("XDG_RUNTIME_DIR")
        if before is not None:
            os.environ["XDG_RUNTIME_DIR"] = before


def _configure(processes: RoundProcesses, scenario: Scenario, folder: Path) -> Link | None:
    """Configure every process, and return the link that can be set down."""
    spec = Spec(role="trainer", parent=os.getpid(), place=str(folder), lanes=LANES, count=COUNT)
    link, near, far = None, None, None
    if scenario == "workers":
        spec = msgspec.structs.replace(spec, source="workers")
    if scenario == "namespaces":
        near, far = (_holder(processes, spec, name) for name in ("near", "far"))
        link = Link(near, far)
    if scenario in {"tcp", "wire", "namespaces"}:
        ChannelKey.create(folder / "key")
        url = f"tcp://{NEAR if link else '127.0.0.1'}:{_free_port()}"
        spec = msgspec.structs.replace(spec, url=url, key=str(folder / "key"))
    processes.actors.append(Actor("trainer", spec, within(near)))
    if scenario == "wire":
        processes.wire = Wire(BitFlips(processes.random), spec, _free_port())
        spec = msgspec.structs.replace(spec, url=f"tcp://127.0.0.1:{processes.wire.port}")
    for lane in range(LANES if scenario != "workers" else 0):
        sender = msgspec.structs.replace(spec, role="sender", lane=lane)
        processes.actors.append(Actor(f"sender-{lane}", sender, within(far)))
    return link


def _holder(processes: RoundProcesses, spec: Spec, name: str) -> int:
    """Start the process that holds a network namespace, and return its id."""
    holder = Actor(name, msgspec.structs.replace(spec, role="holder"), apart())
    processes.holders.append(holder)
    process = holder.start()
    assert process.stdout is not None  # noqa: S101 (of a holder it is a pipe)
    if process.stdout.readline() != "held\n":
        raise LinkNotPossible(holder.tail())
    return process.pid


def _free_port() -> int:
    """Return a port that is free now; every trainer of a round listens there."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


async def _run_round(processes: RoundProcesses, link: Link | None, finish: anyio.Path, seconds: float) -> None:
    """Inject faults for a while, then wait until all processes have ended."""
    async with _relay(processes.wire), anyio.create_task_group() as tasks:
        for actor in processes.actors:
            tasks.start_soon(processes.run, actor)
        await _inject(processes, link, seconds)
        await finish.touch()
        tasks.cancel_scope.deadline = anyio.current_time() + HUNG_S
    if tasks.cancel_scope.cancelled_caught:
        processes.wrong += [f"{each.name} hangs: {each.tail()}" for each in processes.actors if not each.done]


async def _inject(processes: RoundProcesses, link: Link | None, seconds: float) -> None:
    """Inject faults; when this returns, every process that was stopped runs again and the link is up."""
    until = anyio.current_time() + seconds
    async with anyio.create_task_group() as faults:
        while anyio.current_time() < until:
            await anyio.sleep(processes.random.expovariate(1 / EVERY_S))
            if link is not None and processes.random.random() < CUTS:
                await _cut(processes, link)
            elif processes.wire is not None and processes.random.random() < ON_THE_WIRE:
                faults.start_soon(processes.disturb, processes.wire)
            else:
                faults.start_soon(processes.inject_fault)


def _relay(wire: Wire | None) -> AbstractAsyncContextManager[object]:
    if wire is None:
        return nullcontext()
    return relayed(int(wire.flooded.url.rpartition(":")[2]), lambda: wire.flips, wire.port)


async def _cut(processes: RoundProcesses, link: Link) -> None:
    processes.injected["cut"] += 1
    link.cut()
    try:
        await anyio.sleep(processes.random.uniform(0.0, CUT_S))
    finally:
        link.restore()


def _outcome(processes: RoundProcesses, scenario: Scenario, folder: Path) -> Outcome:
    trained, report = read_trained(folder / "run"), folder / "report"
    found = msgspec.json.decode(report.read_bytes(), type=Found) if report.exists() else None
    wrong = list(processes.wrong)
    if not wrong:
        lanes = every_id(LANES, COUNT)
        wrong += judge(lanes, trained, found, may_lose=scenario == "workers")
        wrong += _left_behind(folder)
    return Outcome(TRAJECTORIES * len(trained), sum(found.lost.values()) if found else 0, processes.injected, wrong)


def _processes_left() -> list[str]:
    """Return processes that still exist; those of a trainer that was killed have a while to end."""
    until = time.monotonic() + LEAVING_S
    while (left := _without_remover(left_of(children_of(os.getpid())))) and time.monotonic() < until:
        time.sleep(0.01)
    return left


def _without_remover(left: list[str]) -> list[str]:
    return [each for each in left if REMOVER not in each]


def _left_behind(folder: Path) -> list[str]:
    """Return the processes, sockets, shared memory, and unfinished files that the round left behind."""
    with socket_directory():  # the next process sweeps after those that were killed
        pass
    left = _processes_left()
    left += [str(path) for path in (folder / "sockets").rglob("*")]
    left += [str(path) for path in Path("/dev/shm").glob(f"*penstock*{os.getpid()}*")]  # noqa: S108 (looked at)
    left += [str(path) for path in folder.rglob("*unfinished*")]
    return [f"left behind: {each}" for each in left]
