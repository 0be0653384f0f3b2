"""Many environments over the gateway, with trainers that stall, die and restart: losses, memory, and shares of batches.

    python -m benchmarks.atropos_load --minutes 1

64 processes behave like environments of Atropos; a quarter each has a minimum of 1/64 of every batch, and weight 1, 2
and 4. The trainer is stopped for ten seconds, continued, killed, and restarted, in turn with and without
acknowledgements. At the end the queue is drained, and every accepted group must have arrived, except one batch for each
death of a trainer without acknowledgements while it waits for a response. The gateway's memory must not grow. Of
batches for which twice as many groups waited, each kind of environment must get its share, among those with waiting
groups at the time of the request. Exits with 1 after a failure.
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

HEARTBEAT_TIMEOUT_S = 5.0
"""Time after which disconnected environments no longer delay batches."""

CAPACITY = 1024
"""Bound on groups in the gateway."""

MEMORY_BYTES = 128 * 2**20
"""Bound on the growth of the gateway."""

CONTESTED = 2
"""A batch is contested if so many times its number of groups wait."""

MIN_CONTESTED = 30
"""Number of contested batches below which shares are not significant."""

SHARE_TOLERANCE = 0.15
"""Relative tolerance of a share; in addition, each environment may be a group ahead or behind."""

SAMPLE_S = 0.25

PAGE_BYTES = os.sysconf("SC_PAGESIZE")


@dataclass
class Found:
    """The results of a run."""

    accepted: set[tuple[int, int]] = field(default_factory=set)
    """Groups that the gateway accepted."""
    received: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Number of arrivals of each group."""
    deaths: int = 0
    """Deaths of trainers without acknowledgements, while they waited for a response."""
    left: int = 0
    """Groups in the queue at the end, too few for a batch."""
    contested: list[Contested] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    """The gateway's bytes, sample by sample."""

    def shares(self) -> list[float]:
        """Return the share of each kind of environment in contested batches."""
        return _by_kind([dict(Counter(batch.had)) for batch in self.contested])

    def expected_shares(self, environments: int) -> list[float]:
        """Return the expected shares."""
        parts = parts_of(environments)
        return _by_kind([expected(dict(batch.waiting), parts, len(batch.had)) for batch in self.contested])


class Contested(NamedTuple):
    """A batch for which many more groups waited than it contains."""

    had: list[int]
    """Environment of each of its groups."""
    waiting: list[tuple[int, int]]
    """Number of waiting groups of each environment."""


def parts_of(environments: int) -> list[float]:
    """Return the share of each environment: its minimum, or by weight of the rest that minima leave."""
    kinds = [kind_of(index) for index in range(environments)]
    left = 1 - sum(kind.minimum or 0.0 for kind in kinds)
    weights = sum(kind.weight for kind in kinds if kind.minimum is None)
    return [kind.minimum or left * kind.weight / weights for kind in kinds]


def expected(waiting: Mapping[int, int], parts: Sequence[float], groups: int) -> dict[int, float]:
    """Return the expected number of each environment's groups in a batch: by its share, at most as many as wait."""
    given: dict[int, float] = {}
    left = sum(parts[index] for index in waiting)
    for index in sorted(waiting, key=lambda index: waiting[index] / parts[index]):
        given[index] = min(waiting[index], (groups - sum(given.values())) * parts[index] / left)
        left -= parts[index]
    return given


def _by_kind(batches: Sequence[Mapping[int, float]]) -> list[float]:
    """Return the share of each kind in all batches."""
    had = [0.0] * len(KINDS)
    for batch in batches:
        for index, groups in batch.items():
            had[index % len(KINDS)] += groups
    return [groups / max(1.0, sum(had)) for groups in had]


def judged(found: Found, *, environments: int, batch_size: int) -> list[str]:
    """Return descriptions of failures."""
    wrong: list[str] = []
    missing = len(found.accepted - found.received.keys())
    allowed = found.left + found.deaths * batch_size // GROUP_SIZE
    if missing > allowed:
        wrong.append(f"{missing} groups were accepted and did not arrive; {found.left} wait, {found.deaths} deaths")
    base, peak = found.memory[0], max(found.memory)
    if peak > base + MEMORY_BYTES:
        wrong.append(f"the gateway began with {base:,} bytes and had {peak:,}")
    if len(found.contested) < MIN_CONTESTED:
        return [*wrong, f"{len(found.contested)} batches were contested: too few to judge shares by"]
    a_group_each = environments / len(KINDS) / sum(len(batch.had) for batch in found.contested)
    for kind, share, wanted in zip(KINDS, found.shares(), found.expected_shares(environments), strict=True):
        if abs(share - wanted) > SHARE_TOLERANCE * wanted + a_group_each:
            wrong.append(f"{kind}: expected {wanted:.3f} of contested batches, got {share:.3f}")
    return wrong


def received_by(notes: Path, *, leased: bool, found: Found) -> None:
    """Add the notes of one trainer; it died during a response if its last line is a request."""
    lines = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    first = True
    for line in lines:
        if line != "asking":
            groups = [(index, serial) for index, serial in line["groups"]]
            found.received.update(groups)
            contested = sum(count for _, count in line["waiting"]) >= CONTESTED * len(groups) > 0
            if contested and not first:  # the first may have been formed for the previous trainer
                found.contested.append(Contested([index for index, _ in groups], line["waiting"]))
            first = first and not groups
    found.deaths += not leased and lines[-1:] == ["asking"]


def accepted_in(folder: Path) -> set[tuple[int, int]]:
    """Return the notes of the environments."""
    lines = [line for path in folder.glob("accepted-*") for line in path.read_text().splitlines()]
    return {(index, serial) for index, serial in map(json.loads, lines)}


# -- processes ---------------------------------------------------------------------------------------------------------


@contextmanager
def gateway() -> Iterator[tuple[int, str]]:
    """Start a gateway; yield its process id and its URL."""
    options = ["--port", "0", "--capacity", str(CAPACITY), "--heartbeat-timeout-s", str(HEARTBEAT_TIMEOUT_S)]
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
    """Run these environments without end."""

    async def together() -> None:
        environments = [
            Numbered(config_of(index, url, pace), index=index, tokens=tokens, accepted=folder / f"accepted-{index}")
            for index in indices
        ]
        await asyncio.gather(*(environment.run() for environment in environments))

    asyncio.run(together())


@contextmanager
def environments(count: int, url: str, folder: Path, *, pace: float, tokens: int) -> Iterator[None]:
    """Run so many environments, in processes forked before this one has threads."""
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


def run_trainers(url: str, folder: Path, arguments: argparse.Namespace) -> int:
    """Run trainers, one after another, each stopped for a while and then killed; return their number.

    Time is counted from the registration of all environments, which needs a trainer.
    """
    draw = random.Random(arguments.seed)  # noqa: S311 (no secret)
    number, until = 0, 0.0
    while not until or time.monotonic() < until:
        with _trainer(url, folder, number, arguments) as trainer:
            if not until:
                while len(json.loads(asked(url, "/status"))["environments"]) < arguments.environments:
                    time.sleep(SAMPLE_S)
                until = time.monotonic() + 60 * arguments.minutes
            for pause_s, sent in ((draw.uniform(1, 4), signal.SIGSTOP), (draw.uniform(8, 12), signal.SIGCONT)):
                time.sleep(pause_s)
                trainer.send_signal(sent)
            time.sleep(draw.uniform(3, 6))
            trainer.kill()
        number += 1
        time.sleep(draw.uniform(0.2, 2))
    return number


def leased(number: int) -> bool:
    """Return whether trainer `number` acknowledges."""
    return number % 2 == 1


def _trainer(url: str, folder: Path, number: int, arguments: argparse.Namespace) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.atropos_load", "--trainer", url, "--notes", str(notes(folder, number))]
    command += ["--batch-size", str(arguments.batch_size), "--step-s", str(arguments.step_s)]
    if leased(number):
        command.append("--leased")
    return subprocess.Popen(command)  # noqa: S603 (our own)


def notes(folder: Path, number: int) -> Path:
    """Return the path of the notes of trainer `number`."""
    return folder / f"trainer-{number}"


def asked(url: str, path: str) -> str:
    """Return the response of the gateway."""
    with urllib.request.urlopen(url + path) as response:  # noqa: S310 (our own)
        text: str = response.read().decode()
        return text


@contextmanager
def watched(pid: int, memory: list[int]) -> Iterator[None]:
    """Sample the memory of a process within the body."""
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
    """Run everything, from the start of the gateway to the empty queue."""
    found = Found()
    with gateway() as (pid, url):
        processes = environments(arguments.environments, url, folder, pace=arguments.pace, tokens=arguments.tokens)
        with processes, watched(pid, found.memory):
            trainers = run_trainers(url, folder, arguments)
        Trainer(url, notes(folder, trainers), leased=True, batch_size=arguments.batch_size, step_s=0).run(
            lambda quiet_s: quiet_s > 2 * HEARTBEAT_TIMEOUT_S
        )
        found.left = json.loads(asked(url, "/status"))["queue_size"]
    for number in range(trainers + 1):
        received_by(notes(folder, number), leased=leased(number) or number == trainers, found=found)
    found.accepted = accepted_in(folder)
    return found


def _summary(found: Found, environments: int) -> dict[str, Any]:
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
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--environments", type=int, default=64, help="processes; a multiple of 4")
    parser.add_argument("--batch-size", type=int, default=256, help="sequences")
    parser.add_argument("--step-s", type=float, default=0.3, help="duration of a step of the trainer")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--pace", type=float, default=1.0, help="factor of the pauses of environments")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the results here")
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
    summary = _summary(found, arguments.environments)
    wrong = judged(found, environments=arguments.environments, batch_size=arguments.batch_size)
    print(json.dumps(summary | {"wrong": wrong}, indent=2))
    if arguments.json:
        write_json(arguments.json, summary | {"wrong": wrong})
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
