"""Many environments over the gateway, with a trainer that stalls, dies and returns: what is lost, held, and shared out.

    python -m benchmarks.atropos_load --minutes 1

64 processes behave as environments of Atropos do; a quarter each has a minimum of 1/64 of every batch, and weight 1, 2
and 4. The trainer is stopped for ten seconds, goes on, is killed, and comes back, by turns one that acknowledges its
batches and one that does not. At the end the queue is drained, and every group that an environment was told is accepted
has to have come, but for a batch a death of a trainer that acknowledges nothing while it waits for an answer. The
gateway's memory must not grow. Of batches for which twice as much waited, each kind of environment has its part, among
those that had something waiting when the batch was asked for. Exits with 1 where something was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from .atropos_load_actors import GROUP_SIZE, KINDS, Numbered, Trainer, config_of, kind_of
from .report import write_json

__all__ = ["Contested", "Found", "accepted_in", "asked", "expected", "judged", "main", "parts_of", "received_by"]

SILENCE_S = 5.0
"""After so long, environments that are gone hold nobody back."""

CAPACITY = 1024
"""Groups in the gateway."""

MEMORY_BYTES = 128 * 2**20
"""What the gateway may need beyond what it began with."""

CONTESTED = 2
"""A batch is contested where so many times its groups wait."""

FEWEST_CONTESTED = 30
"""Batches below which shares say nothing."""

SHARE_TOLERANCE = 0.15
"""Of its part; besides, each environment may be a group ahead or behind."""

SAMPLE_S = 0.25

PAGE_BYTES = os.sysconf("SC_PAGESIZE")


@dataclass
class Found:
    """What came of a run."""

    accepted: set[tuple[int, int]] = field(default_factory=set)
    """Groups that environments were told are in the queue."""
    received: Counter[tuple[int, int]] = field(default_factory=Counter)
    """How often each came."""
    deaths: int = 0
    """Of trainers that acknowledge nothing, while they waited for an answer."""
    left: int = 0
    """Groups in the queue at the end, of which no batch could be made."""
    contested: list[Contested] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    """The gateway's bytes, sample by sample."""

    def shares(self) -> list[float]:
        """What environments of each kind had of contested batches."""
        return _by_kind([dict(Counter(batch.had)) for batch in self.contested])

    def expected_shares(self, environments: int) -> list[float]:
        """What they were to have."""
        parts = parts_of(environments)
        return _by_kind([expected(dict(batch.waiting), parts, len(batch.had)) for batch in self.contested])


class Contested(NamedTuple):
    """A batch for which much more waited than it holds."""

    had: list[int]
    """Whose each of its groups was."""
    waiting: list[tuple[int, int]]
    """How many groups of each environment waited."""


def parts_of(environments: int) -> list[float]:
    """The part of each environment: its minimum, or of what minima leave by its weight."""
    kinds = [kind_of(index) for index in range(environments)]
    left = 1 - sum(kind.minimum or 0.0 for kind in kinds)
    weights = sum(kind.weight for kind in kinds if kind.minimum is None)
    return [kind.minimum or left * kind.weight / weights for kind in kinds]


def expected(waiting: Mapping[int, int], parts: Sequence[float], groups: int) -> dict[int, float]:
    """How many of so many groups each environment is to have: by its part, and what one has not waiting others get."""
    given: dict[int, float] = {}
    left = sum(parts[index] for index in waiting)
    for index in sorted(waiting, key=lambda index: waiting[index] / parts[index]):
        given[index] = min(waiting[index], (groups - sum(given.values())) * parts[index] / left)
        left -= parts[index]
    return given


def _by_kind(batches: Sequence[Mapping[int, float]]) -> list[float]:
    """The part of each kind in all batches."""
    had = [0.0] * len(KINDS)
    for batch in batches:
        for index, groups in batch.items():
            had[index % len(KINDS)] += groups
    return [groups / max(1.0, sum(had)) for groups in had]


def judged(found: Found, *, environments: int, batch_size: int) -> list[str]:
    """What is wrong, in sentences."""
    wrong: list[str] = []
    missing = len(found.accepted - found.received.keys())
    allowed = found.left + found.deaths * batch_size // GROUP_SIZE
    if missing > allowed:
        wrong.append(f"{missing} groups were accepted and did not come; {found.left} wait, {found.deaths} deaths")
    base, peak = found.memory[0], max(found.memory)
    if peak > base + MEMORY_BYTES:
        wrong.append(f"the gateway began with {base:,} bytes and had {peak:,}")
    if len(found.contested) < FEWEST_CONTESTED:
        return [*wrong, f"{len(found.contested)} batches were contested: too few to judge shares by"]
    a_group_each = environments / len(KINDS) / sum(len(batch.had) for batch in found.contested)
    for kind, share, wanted in zip(KINDS, found.shares(), found.expected_shares(environments), strict=True):
        if abs(share - wanted) > SHARE_TOLERANCE * wanted + a_group_each:
            wrong.append(f"{kind}: expected {wanted:.3f} of contested batches, got {share:.3f}")
    return wrong


def received_by(notes: Path, *, leased: bool, found: Found) -> None:
    """Add what one trainer noted; it died in the middle of an answer where its last line says that it asked."""
    lines = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    first = True
    for line in lines:
        if line != "asking":
            groups = [(index, serial) for index, serial in line["groups"]]
            found.received.update(groups)
            contested = sum(count for _, count in line["waiting"]) >= CONTESTED * len(groups) > 0
            if contested and not first:  # the first may have been formed for the trainer before, when others waited
                found.contested.append(Contested([index for index, _ in groups], line["waiting"]))
            first = first and not groups
    found.deaths += not leased and lines[-1:] == ["asking"]


def accepted_in(folder: Path) -> set[tuple[int, int]]:
    """What environments noted."""
    lines = [line for path in folder.glob("accepted-*") for line in path.read_text().splitlines()]
    return {(index, serial) for index, serial in map(json.loads, lines)}


# -- processes ---------------------------------------------------------------------------------------------------------


@contextmanager
def gateway() -> Iterator[tuple[int, str]]:
    """A gateway's process id, and where it listens."""
    options = ["--port", "0", "--capacity", str(CAPACITY), "--heartbeat-timeout-s", str(SILENCE_S)]
    command = [sys.executable, "-c", "from penstock._cli import main; main()", "gateway", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:  # noqa: S603 (our own)
        try:
            assert running.stdout is not None  # noqa: S101 (it is a pipe)
            line = running.stdout.readline()
            if not line.startswith("listening at "):
                sys.exit(f"expected the gateway to listen, got {line!r}")
            yield running.pid, line.removeprefix("listening at ").strip()
        finally:
            running.terminate()


def play(indices: Sequence[int], url: str, folder: Path, *, pace: float, tokens: int) -> None:
    """Be these environments, for ever."""

    async def together() -> None:
        environments = [
            Numbered(config_of(index, url, pace), index=index, tokens=tokens, accepted=folder / f"accepted-{index}")
            for index in indices
        ]
        await asyncio.gather(*(environment.run() for environment in environments))

    asyncio.run(together())


@contextmanager
def environments(count: int, url: str, folder: Path, *, pace: float, tokens: int) -> Iterator[None]:
    """So many processes, forked off this one while it is nothing but an interpreter with modules."""
    children: list[int] = []
    try:
        for index in range(count):
            child = os.fork()
            if child == 0:
                with open(os.devnull, "w") as nowhere:  # noqa: PTH123 (a descriptor is needed)
                    os.dup2(nowhere.fileno(), 2)
                try:
                    play([index], url, folder, pace=pace, tokens=tokens)
                finally:
                    os._exit(1)
            children.append(child)
        yield
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)


def lives(url: str, folder: Path, arguments: argparse.Namespace) -> int:
    """Trainers, one after another, each stopped for a while and then killed; returns how many there were.

    Time is counted from when all environments are registered, which they are when there is a trainer.
    """
    draw = random.Random(arguments.seed)  # noqa: S311 (hides nothing)
    number, until = 0, 0.0
    while not until or time.monotonic() < until:
        with _trainer(url, folder, number, arguments) as trainer:
            if not until:
                while len(json.loads(asked(url, "/status"))["environments"]) < arguments.environments:
                    time.sleep(SAMPLE_S)
                until = time.monotonic() + 60 * arguments.minutes
            for lasts_s, blow in ((draw.uniform(1, 4), signal.SIGSTOP), (draw.uniform(8, 12), signal.SIGCONT)):
                time.sleep(lasts_s)
                trainer.send_signal(blow)
            time.sleep(draw.uniform(3, 6))
            trainer.kill()
        number += 1
        time.sleep(draw.uniform(0.2, 2))
    return number


def leased(number: int) -> bool:
    """Whether trainer `number` acknowledges."""
    return number % 2 == 1


def _trainer(url: str, folder: Path, number: int, arguments: argparse.Namespace) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.atropos_load", "--trainer", url, "--notes", str(notes(folder, number))]
    command += ["--batch-size", str(arguments.batch_size), "--step-s", str(arguments.step_s)]
    if leased(number):
        command.append("--leased")
    return subprocess.Popen(command)  # noqa: S603 (our own)


def notes(folder: Path, number: int) -> Path:
    """What trainer `number` noted."""
    return folder / f"trainer-{number}"


def asked(url: str, path: str) -> str:
    """What the gateway answers."""
    with urllib.request.urlopen(url + path) as answer:  # noqa: S310 (our own)
        text: str = answer.read().decode()
        return text


@contextmanager
def watched(pid: int, memory: list[int]) -> Iterator[None]:
    """Sample a process' memory."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(SAMPLE_S):
            memory.append(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()


# -- a run -------------------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace, folder: Path) -> Found:
    """Everything, from the gateway's start to the empty queue."""
    found = Found()
    with gateway() as (pid, url):
        processes = environments(arguments.environments, url, folder, pace=arguments.pace, tokens=arguments.tokens)
        with processes, watched(pid, found.memory):
            trainers = lives(url, folder, arguments)
        Trainer(url, notes(folder, trainers), leased=True, batch_size=arguments.batch_size, step_s=0).run(
            lambda quiet_s: quiet_s > 2 * SILENCE_S
        )
        found.left = json.loads(asked(url, "/status"))["queue_size"]
    for number in range(trainers + 1):
        received_by(notes(folder, number), leased=leased(number) or number == trainers, found=found)
    found.accepted = accepted_in(folder)
    return found


def _told(found: Found, environments: int) -> dict[str, Any]:
    grown = [later - earlier for earlier, later in pairwise(found.memory)]
    return {
        "accepted": len(found.accepted),
        "received": len(found.received),
        "came_twice": sum(count > 1 for count in found.received.values()),
        "missing": len(found.accepted - found.received.keys()),
        "left_in_queue": found.left,
        "deaths_in_an_answer": found.deaths,
        "memory_mib": [round(value / 2**20, 1) for value in (found.memory[0], max(found.memory), found.memory[-1])],
        "largest_growth_mib": round(max(grown) / 2**20, 1),
        "contested_batches": len(found.contested),
        "shares": [round(share, 3) for share in found.shares()],
        "expected_shares": [round(share, 3) for share in found.expected_shares(environments)],
        "kinds": [kind_of(index)._asdict() for index in range(len(KINDS))],
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--environments", type=int, default=64, help="processes; a multiple of 4")
    parser.add_argument("--batch-size", type=int, default=256, help="sequences")
    parser.add_argument("--step-s", type=float, default=0.3, help="what a step of the trainer takes")
    parser.add_argument("--tokens", type=int, default=64, help="of a sequence")
    parser.add_argument("--pace", type=float, default=1.0, help="by how much environments' waits are multiplied")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write what came of it")
    parser.add_argument("--trainer", help=argparse.SUPPRESS)
    parser.add_argument("--notes", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--leased", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trainer:
        Trainer(
            arguments.trainer,
            arguments.notes,
            leased=arguments.leased,
            batch_size=arguments.batch_size,
            step_s=arguments.step_s,
        ).run(lambda _: False)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = run(arguments, Path(folder))
    told = _told(found, arguments.environments)
    wrong = judged(found, environments=arguments.environments, batch_size=arguments.batch_size)
    print(json.dumps(told | {"wrong": wrong}, indent=2))
    if arguments.json:
        write_json(arguments.json, told | {"wrong": wrong})
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
