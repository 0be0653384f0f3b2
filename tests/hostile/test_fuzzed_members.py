"""Members that send any reports and messages, to a run in a process of its own: it trains what the others send."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, get_args

import anyio
import anyio.lowlevel
import msgspec
import pytest
import zmq
from anyio.abc import Process
from tests.failsafe import FAILSAFE_S
from tests.hostile.members import GROUP_SIZE, Member, member, numbered
from tests.ports import free_port
from tests.wire import Finished, Wants

from penstock.accounting import EndState
from penstock.channels import ChannelKey
from penstock.errors import NobodyListens, PeerClosed, PeerLost

pytestmark = pytest.mark.anyio

COUNTS = 2 + len(get_args(EndState))
"""Counts of a report: admitted, succeeded, and each end state."""

EDGES = [0, 1, -1, 2, 7, 65_535, 65_536, 2**31, 2**32 - 1, 2**40, 2**53, 2**63 - 1, -(2**63), 2**64 - 1]

WORDS = ["", "trained", "failed", "Rollouts", "0", "1", "tcp://127.0.0.1:1", "shm:///x", "x" * 300, "\x1b[2J", "é"]

TAGS = [
    "Starting",
    "Connected",
    "Serving",
    "Joins",
    "Wants",
    "Leaves",
    "Left",
    "Publish",
    "Outcomes",
    "Nothing",
]
"""Not `Failed`, which ends a run, nor `Finished`, which ends a share of the work: members may say so."""

FIELDS = {
    "Starting": ["phase"],
    "Connected": ["transport", "pid", "node", "numa"],
    "Serving": ["url"],
    "Joins": ["digest"],
    "Left": ["reason"],
}

MESSAGES = [
    "Publish",
    "CreditRequest",
    "Telemetry",
    "Close",
    "ChunkRequest",
    "DeltaRequest",
    "Connect",
    "CreditGrant",
    "Outcomes",
]


class Fuzzer:
    """Draws reports and messages, the same for a seed."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)  # noqa: S311 (repeatable)

    def integer(self) -> int:
        return self.random.choice([self.random.choice(EDGES), self.random.randrange(-10, 100)])

    def text(self) -> str:
        return self.random.choice(WORDS)

    def anything(self, depth: int = 0) -> Any:
        plain = [self.integer(), self.text(), None, self.random.random(), self.random.randbytes(8)]
        nested = [self.some(depth), {self.text(): self.anything(depth + 1)}] if depth < 2 else []
        return self.random.choice([*plain, *nested])

    def some(self, depth: int = 0) -> list[Any]:
        return [self.anything(depth + 1) for _ in range(self.random.randrange(6))]

    def event(self) -> Any:
        tag = self.random.choice(TAGS)
        return {"type": tag} | {name: self.random.choice([self.text, self.integer])() for name in FIELDS.get(tag, [])}

    def ending(self) -> list[Any]:
        group = [self.text(), str(self.integer())]
        return [group, [self.integer() for _ in range(self.random.randrange(3))], self.text(), self.text()]

    def integers(self) -> list[Any]:
        """Return the fields of a report of the right form, with any integers."""
        counts = [self.integer() for _ in range(self.random.choice([COUNTS, COUNTS, 0, 100]))]
        return [None, [], {self.random.choice(WORDS[1:3]): {self.text(): self.integer()}}, counts]

    def implausible(self) -> list[int]:
        """Return counts of which at least one is one that no worker has."""
        counts = [self.integer() for _ in range(COUNTS)]
        counts[self.random.randrange(COUNTS)] = self.random.choice([-1, -(2**63), 2**40, 2**63, 2**64 - 1])
        return counts

    def observed(self) -> list[Any]:
        part = [self.integer(), self.integer(), self.integer(), {self.text(): [self.integer(), 1.0]}]
        values = {self.text(): self.random.choice([1.0, float("nan"), float("inf"), self.integer()])}
        return [[{}, values, values, values, values, [part]], [], {}, []]

    def report(self) -> bytes:
        reports = [
            self.integers(),
            self.observed(),
            [None, [self.ending()], {}, []],
            [None, [], {}, [], self.event(), self.random.random() < 0.7],
            self.some(),
        ]
        return self.changed(msgspec.msgpack.encode(self.random.choice(reports)))

    def changed(self, encoded: bytes) -> bytes:
        """Return some bytes as they are, and others with a byte changed, or cut."""
        at = self.random.randrange(len(encoded))
        return self.random.choice(
            [encoded, encoded, encoded[:at], encoded[:at] + self.random.randbytes(1) + encoded[at + 1 :]]
        )

    def message(self) -> bytes:
        """Return a message of the channel with any fields, descriptors among them."""
        descriptors = [[self.integer() for _ in range(6)] for _ in range(self.random.randrange(3))]
        fields: list[Any] = self.random.choice([[descriptors], [self.integer()], self.some()])
        return self.changed(msgspec.msgpack.encode([self.random.choice(MESSAGES), *fields]))

    def batch(self) -> Iterator[bytes]:
        """Yield messages of a member: reports, which are enveloped, and others."""
        for _ in range(self.random.randrange(1, 12)):
            if self.random.random() < 0.75:
                yield msgspec.msgpack.encode(["Telemetry", self.report()])
            else:
                yield self.message()


@dataclass
class Run:
    """A run in a process of its own."""

    url: str
    key: ChannelKey
    process: Process
    result: dict[str, Any] = field(default_factory=dict)


@asynccontextmanager
async def running(mode: str, path: Path, groups: int) -> AsyncIterator[Run]:
    """Start a run with the key at `path`, and wait for its end after the body."""
    url = f"tcp://127.0.0.1:{free_port()}"
    key = await anyio.to_thread.run_sync(ChannelKey.load, path)
    command = [sys.executable, "-m", "tests.hostile.script_of_a_joined_run", mode, url, str(path), str(groups)]
    async with await anyio.open_process(command, stderr=None) as process:
        run = Run(url, key, process)
        try:
            await started(run)
            yield run
            assert process.stdout is not None
            with anyio.fail_after(FAILSAFE_S):
                printed = b"".join([part async for part in process.stdout])
                assert await process.wait() == 0
            run.result = json.loads(printed)
        finally:
            if process.returncode is None:
                process.kill()


async def started(run: Run) -> None:
    with anyio.fail_after(FAILSAFE_S):
        while True:
            try:
                async with member(run.url, run.key):
                    return
            except NobodyListens:
                await anyio.sleep(0.05)


async def attack(run: Run, fuzzer: Fuzzer) -> int:
    """Join, mostly, and send any messages until the run has had enough; return how many were sent."""
    sent = 0
    with suppress(PeerClosed, PeerLost):
        async with member(run.url, run.key, name="hostile") as hostile:
            if fuzzer.random.random() < 0.8:
                await hostile.join()
                for _ in range(fuzzer.random.randrange(3)):
                    hostile.report(Wants())
            for message in fuzzer.batch():
                send_raw(hostile, message)
                sent += 1
                await anyio.lowlevel.checkpoint()
            if fuzzer.random.random() < 0.2:
                hostile.sender.send_nowait(numbered(fuzzer.random.randrange(100)))
    return sent


def send_raw(hostile: Member, message: bytes) -> None:
    with suppress(zmq.ZMQError):
        hostile.sender._connection._socket.send(message, zmq.NOBLOCK)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """The file of a key."""
    ChannelKey.create(tmp_path / "key")
    return tmp_path / "key"


SEEDS = [pytest.param(33, 150, id="150 messages"), pytest.param(34, 5000, id="5000", marks=pytest.mark.long)]


@pytest.mark.parametrize(("seed", "least"), SEEDS)
async def test_what_members_send_to_a_run_that_assigns_prompts_ends_only_their_connections(
    seed: int, least: int, key: Path
) -> None:
    fuzzer, sent, rounds = Fuzzer(seed), 0, 0
    async with running("assigned", key, groups=5 * least) as run, member(run.url, run.key, name="honest") as honest:
        await honest.join()
        sampled: list[int | None] = []
        while sent < least:
            sent += await attack(run, fuzzer)
            sampled.append(await honest.sample())
            rounds += 1
        sampled += await honest.sample_all()

    result = run.result
    assert result["balanced"]
    assert result["in_flight"] == 0
    assert None not in sampled
    assert {str(number) for number in sampled} <= set(result["trained"])
    assert len(set(result["trained"])) == len(result["trained"])
    assert result["admitted"] == sum(result["ended"].values()) == 5 * least * GROUP_SIZE
    assert result["ended"]["trained"] == len(result["trained"]) * GROUP_SIZE
    assert result["rejected"] > rounds // 4


@pytest.mark.parametrize(("seed", "least"), SEEDS)
async def test_what_members_report_to_a_run_that_counts_it_is_refused_or_plausible(
    seed: int, least: int, key: Path
) -> None:
    fuzzer, sent, sampled = Fuzzer(seed), 0, 0
    async with running("reporting", key, groups=0) as run:
        async with member(run.url, run.key, name="honest") as honest:
            await honest.join()
            while sent < least:
                sent += await attack(run, fuzzer)
                await honest.sender.send(numbered(10_000 + sampled))
                sampled += 1
            honest.report(Finished())
        async with member(run.url, run.key, name="another") as honest:
            await honest.join()
            honest.report(Finished())

    result = run.result
    assert result["balanced"]
    assert result["in_flight"] == 0
    assert {str(10_000 + number) for number in range(sampled)} <= set(result["trained"])
    assert result["ended"]["trained"] == len(result["trained"]) * GROUP_SIZE
    assert all(0 <= count < 2**32 for count in result["ended"].values())
    assert result["rejected"] > sampled // 4


@pytest.mark.parametrize(("seed", "reports"), [(35, 100), pytest.param(36, 1000, marks=pytest.mark.long)])
async def test_reports_with_any_integers_are_refused_and_counted(seed: int, reports: int, key: Path) -> None:
    fuzzer, refused, sampled = Fuzzer(seed), 0, 0
    async with running("reporting", key, groups=0) as run:
        async with member(run.url, run.key, name="honest") as honest:
            await honest.join()
            for _ in range(reports):
                async with member(run.url, run.key, name="hostile") as hostile:
                    await hostile.join()
                    hostile.send(msgspec.msgpack.encode([None, [], {}, fuzzer.implausible()]))
                    await hostile.disconnected()
                    refused += 1
                await honest.sender.send(numbered(sampled))
                sampled += 1
            honest.report(Finished())
        async with member(run.url, run.key, name="another") as honest:
            await honest.join()
            honest.report(Finished())

    assert run.result["balanced"]
    assert sorted(map(int, run.result["trained"])) == list(range(sampled))
    assert run.result["admitted"] == run.result["ended"]["trained"] == sampled * GROUP_SIZE
    assert run.result["rejected"] > refused // 2  # of many, only some are logged
    assert refused == reports


SAME = (7, 7, 8)


async def test_a_fuzzer_draws_the_same_messages_for_a_seed() -> None:
    first, second, other = ([message for _ in range(5) for message in fuzzer.batch()] for fuzzer in map(Fuzzer, SAME))

    assert first == second != other
