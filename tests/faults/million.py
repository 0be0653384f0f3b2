"""A million trajectories through four producers; every id, column and byte is compared with what it has to be.

    python -m tests.faults.million [TRAJECTORIES]

Producers are forked before anything has a thread. A record is a slice of arrays that all processes share, at a position
that follows from its name, so that a received record can be checked without the sent one.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from typing import Any

import anyio
import numpy as np
from tests.watchdog import tell_when_asked

from penstock import TrajectoryGroup
from penstock.accounting import Ledger
from penstock.channels import connect, serve
from penstock.records import Array

PRODUCERS = 4
GROUP = 8
TOKENS = 3
"""Tokens of each trajectory: a prompt of one, an answer of two."""

VARIETY = 65_521
"""Positions of a record; prime, so that every producer uses all of them."""

_random = np.random.default_rng(0)
_long, _short = VARIETY + GROUP * TOKENS, VARIETY + GROUP

LONG: dict[str, Array] = {
    "tokens": _random.integers(0, 2**31 - 1, _long, np.int32),
    "loss_mask": _random.random(_long) < 0.5,
    "behavior_logprobs": -_random.random(_long, np.float32),
    "advantages": _random.standard_normal(_long, np.float32),
}
"""Columns over tokens."""

SHORT: dict[str, Array] = {
    "rewards": _random.standard_normal(_short, np.float32),
    "policy_versions": _random.integers(0, 2**62, _short),
    "stop_reasons": _random.integers(0, 5, _short).astype(np.uint8),
}
"""Columns over sequences."""

SAME: dict[str, Any] = {
    "offsets": np.arange(GROUP + 1) * TOKENS,
    "rollout_ids": np.arange(GROUP),
}

LENGTHS = dict.fromkeys(LONG, GROUP * TOKENS) | dict.fromkeys(SHORT, GROUP)
LENGTHS |= {name: len(column) for name, column in SAME.items()}

BYTES = {name: column.tobytes() for name, column in (LONG | SHORT | SAME).items()}


def cut_at(producer: int, number: int) -> int:
    """Return the position of the columns of a record."""
    return (number * 7919 + producer * 16_381) % VARIETY


def record_of(producer: int, number: int) -> TrajectoryGroup:
    """Return a record as it is sent."""
    at = cut_at(producer, number)
    columns: dict[str, Any] = {name: column[at : at + GROUP * TOKENS] for name, column in LONG.items()}
    columns |= {name: column[at : at + GROUP] for name, column in SHORT.items()}
    return TrajectoryGroup(env=str(producer), instance_id=str(number), **columns, **SAME)


async def produce(url: str, producer: int, groups: int) -> None:
    """Send `groups` records."""
    async with connect(url, TrajectoryGroup, name=f"producer {producer}") as outbox:
        for number in range(groups):
            await outbox.send(record_of(producer, number))


class Checker:
    """Compares received records with the expected ones."""

    def __init__(self) -> None:
        self.next: Counter[int] = Counter()
        """The number of the next record, by producer."""

    def check(self, record: TrajectoryGroup) -> None:
        """Check the next record of a producer.

        Raises:
            AssertionError: anything differs.
        """
        producer = int(record.env)
        number = self.next[producer]
        assert record.instance_id == str(number), f"expected {number} of {producer}, got {record.instance_id}"
        self.next[producer] += 1
        at, columns = cut_at(producer, number), record.columns()
        assert columns.keys() == BYTES.keys()
        for name, column in columns.items():
            first = 0 if name in SAME else at * column.itemsize
            last = first + LENGTHS[name] * column.itemsize
            assert column.tobytes() == BYTES[name][first:last], f"{name} of {producer}.{number}"


async def consume(writers: list[int], groups: int) -> None:
    """Receive and check everything; `writers` are pipes from which the producers read the URL."""
    ledger, checker = Ledger(), Checker()
    async with serve("shm://", TrajectoryGroup, capacity=256, capacity_bytes=2**20, senders=PRODUCERS) as inbox:
        for pipe in writers:
            os.write(pipe, inbox.url.encode())
        began = time.monotonic()
        async for record in inbox:
            checker.check(record)
            ledger.hand_over(record)
            ledger.end(record, "trained")
            del record
        took = time.monotonic() - began
    assert checker.next == dict.fromkeys(range(PRODUCERS), groups)
    balance = ledger.balance()
    assert balance.admitted == balance.ended["trained"] == PRODUCERS * groups * GROUP
    per_s = balance.admitted / took
    print(f"{balance.admitted:,} trajectories verified in {took:.1f} s, {per_s:,.0f}/s")  # noqa: T201 (as it says)


def main(trajectories: int = 1_000_000) -> None:
    """Fork the producers, consume, and assert that they ended well."""
    tell_when_asked()
    groups = trajectories // (PRODUCERS * GROUP)
    writers, pids = [], []
    for producer in range(PRODUCERS):
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            status = 1
            try:
                anyio.run(produce, os.read(reader, 1000).decode(), producer, groups)
                status = 0
            finally:
                os._exit(status)
        os.close(reader)
        writers.append(writer)
        pids.append(pid)
    anyio.run(consume, writers, groups)
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
