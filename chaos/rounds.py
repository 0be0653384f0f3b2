"""One round: processes play, blows fall for a while, everything has to come to its end, and the verdict."""

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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import anyio
import msgspec

from penstock import GroupId
from penstock._pipeline.channels.socket_directory import socket_directory
from penstock.channels import ChannelKey

from .actors import Found, Spec, read_trained
from .cast import Actor, Cast, children_of, left_of
from .network import NEAR, Line, LineNotPossible, apart, within
from .records import every_id

__all__ = ["SCENARIOS", "Outcome", "Scenario", "judge", "play"]

Scenario: TypeAlias = Literal["workers", "shm", "tcp", "namespaces"]
"""workers: a pipeline with its sources and a stage in workers · shm, tcp: senders that outlive their trainer ·
namespaces: as tcp, the senders in another network namespace, and the line is cut too. A journal is in all of them."""

SCENARIOS: tuple[Scenario, ...] = ("workers", "shm", "tcp", "namespaces")

LANES, COUNT = 3, 400
"""Senders, and records of each."""

TRAJECTORIES = 2
"""In each record."""

CUTS = 0.4
"""The share of cuts among blows, where there is a line."""

REMOVE = "import os, shutil, sys; sys.stdin.read()\nwhile os.path.exists(sys.argv[1]): shutil.rmtree(sys.argv[1], True)"
"""Removes a folder when the driver closes its stdin or is killed; processes that die just then may still write."""

REMOVER = REMOVE.partition("\n")[0]
"""In the command of the process that runs it."""

LEAVING_S = 60.0
"""How long a process may be there after its parent was killed, on a busy machine."""

EVERY_S = 0.8
"""Seconds between two blows, on average."""

CUT_S = 4.0
"""How long a line is cut at most: twice as long as silence is borne."""

HUNG_S = 180.0
"""When blows have ended, everything has ended after this time, or hangs: it takes seconds on an idle machine."""

ALLOWED = ("(pid ", "in flight when the run ended")
"""In the reasons of trajectories that may be lost: they were held by a worker that died, which is named."""


@dataclass(frozen=True)
class Outcome:
    """The result of a round."""

    trained: int
    """Trajectories."""
    lost: int
    """Trajectories that were reported lost, with a worker that died."""
    dealt: Counter[str]
    wrong: list[str]


def judge(expected: set[GroupId], trained: Sequence[GroupId], found: Found | None, *, may_lose: bool) -> list[str]:
    """Return everything that is wrong with what was trained, in words.

    A record may be missing only where the books of the run say that a worker died with it.
    """
    if found is None:
        return ["the trainer left no report"]
    wrong = [f"{each} was trained {count} times" for each, count in Counter(trained).items() if count > 1]
    wrong += [f"{each} was trained and never sent" for each in set(trained) - expected]
    if not found.balanced or found.in_flight:
        wrong.append(f"the books do not balance: {found}")
    missing, lost = expected - set(trained), sum(found.lost.values())
    if missing and (not may_lose or 2 * len(missing) > lost):
        wrong.append(f"{len(missing)} records are missing, {lost} trajectories reported lost, as {sorted(missing)[:3]}")
    wrong += [f"lost as {reason!r}" for reason in found.lost if not may_lose or not _allowed(reason)]
    if found.stop_reason != "end of stream":
        wrong.append(f"the run was ended by {found.stop_reason}")
    return wrong


def _allowed(reason: str) -> bool:
    return any(part in reason for part in ALLOWED)


async def play(scenario: Scenario, seed: str, seconds: float) -> Outcome:
    """Play one round, whose blows follow from `seed` and fall for `seconds`.

    Raises:
        LineNotPossible: `namespaces` asks for what this machine does not permit.
    """
    with _folder() as folder:
        cast = Cast(random.Random(seed))  # noqa: S311 (no secret)
        try:
            line = _engage(cast, scenario, folder)
            await _play(cast, line, anyio.Path(folder, "finish"), seconds)
        finally:
            cast.kill()
        return _outcome(cast, scenario, folder)


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder of its own, where sockets lie too."""
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


def _engage(cast: Cast, scenario: Scenario, folder: Path) -> Line | None:
    """Give every process its orders, and return the line that can be cut."""
    spec = Spec(role="trainer", parent=os.getpid(), place=str(folder), lanes=LANES, count=COUNT)
    line, near, far = None, None, None
    if scenario == "workers":
        spec = msgspec.structs.replace(spec, source="workers")
    if scenario == "namespaces":
        near, far = (_holder(cast, spec, name) for name in ("near", "far"))
        line = Line(near, far)
    if scenario in {"tcp", "namespaces"}:
        ChannelKey.create(folder / "key")
        url = f"tcp://{NEAR if line else '127.0.0.1'}:{_free_port()}"
        spec = msgspec.structs.replace(spec, url=url, key=str(folder / "key"))
    cast.actors.append(Actor("trainer", spec, within(near)))
    for lane in range(LANES if scenario != "workers" else 0):
        orders = msgspec.structs.replace(spec, role="sender", lane=lane)
        cast.actors.append(Actor(f"sender-{lane}", orders, within(far)))
    return line


def _holder(cast: Cast, spec: Spec, name: str) -> int:
    """Start the process that keeps a network namespace, and return its id."""
    holder = Actor(name, msgspec.structs.replace(spec, role="holder"), apart())
    cast.holders.append(holder)
    process = holder.start()
    assert process.stdout is not None  # noqa: S101 (of a holder it is a pipe)
    if process.stdout.readline() != "held\n":
        raise LineNotPossible(holder.tail())
    return process.pid


def _free_port() -> int:
    """Return a port that nothing listens at now; every trainer of a round listens there."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


async def _play(cast: Cast, line: Line | None, finish: anyio.Path, seconds: float) -> None:
    """Let blows fall for a while, then wait until all have ended."""
    async with anyio.create_task_group() as tasks:
        for actor in cast.actors:
            tasks.start_soon(cast.play, actor)
        await _deal(cast, line, seconds)
        await finish.touch()
        tasks.cancel_scope.deadline = anyio.current_time() + HUNG_S
    if tasks.cancel_scope.cancelled_caught:
        cast.wrong += [f"{each.name} hangs: {each.tail()}" for each in cast.actors if not each.done]


async def _deal(cast: Cast, line: Line | None, seconds: float) -> None:
    """Deal blows; when this returns, every process that was stopped runs again and the line is whole."""
    until = anyio.current_time() + seconds
    async with anyio.create_task_group() as blows:
        while anyio.current_time() < until:
            await anyio.sleep(cast.random.expovariate(1 / EVERY_S))
            if line is not None and cast.random.random() < CUTS:
                await _cut(cast, line)
            else:
                blows.start_soon(cast.strike)


async def _cut(cast: Cast, line: Line) -> None:
    cast.dealt["cut"] += 1
    line.cut()
    try:
        await anyio.sleep(cast.random.uniform(0.0, CUT_S))
    finally:
        line.mend()


def _outcome(cast: Cast, scenario: Scenario, folder: Path) -> Outcome:
    trained, report = read_trained(folder / "run"), folder / "report"
    found = msgspec.json.decode(report.read_bytes(), type=Found) if report.exists() else None
    wrong = list(cast.wrong)
    if not wrong:
        lanes = every_id(LANES, COUNT)
        wrong += judge(lanes, trained, found, may_lose=scenario == "workers")
        wrong += _left_behind(folder)
    return Outcome(TRAJECTORIES * len(trained), sum(found.lost.values()) if found else 0, cast.dealt, wrong)


def _processes_left() -> list[str]:
    """Return processes that are still there; those of a trainer that was killed get a while to be gone."""
    until = time.monotonic() + LEAVING_S
    while (left := _without_remover(left_of(children_of(os.getpid())))) and time.monotonic() < until:
        time.sleep(0.01)
    return left


def _without_remover(left: list[str]) -> list[str]:
    return [each for each in left if REMOVER not in each]


def _left_behind(folder: Path) -> list[str]:
    """Return what the round left: processes, sockets, shared memory, and files of no use."""
    with socket_directory():  # the next process sweeps after those that were killed
        pass
    left = _processes_left()
    left += [str(path) for path in (folder / "sockets").rglob("*")]
    left += [str(path) for path in Path("/dev/shm").glob(f"*penstock*{os.getpid()}*")]  # noqa: S108 (looked at)
    left += [str(path) for path in folder.rglob("*unfinished*")]
    return [f"left behind: {each}" for each in left]
