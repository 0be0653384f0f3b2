"""Fifty versions to five hosts, in processes: one link is cut again and again, one is slow, one host is killed, and one
joins late. Every version that a host has is the one that was published, by its hash."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import xxhash
from tests.failsafe import FAILSAFE_S
from tests.moments import moment
from tests.processes.children import child, line
from tests.processes.weight_relay import Relay, relay

from penstock.weights import WeightAddress, WeightPublisher

VERSIONS = 50

WORDS = 9 * 2**19 + 1
"""One span of 8 MiB and a part of another, with an odd number of bytes."""

HOST = """
    import os, pickle, sys, anyio, anyio.to_thread, numpy as np, xxhash
    from penstock.weights import WeightSubscriber

    async def main():
        model = {"weight": np.zeros(int(sys.argv[2]), np.int16), "byte": np.zeros(1, np.uint8)}
        async with WeightSubscriber(pickle.loads(bytes.fromhex(sys.argv[1]))) as subscriber:
            subscriber.attach(model)
            while True:
                await subscriber.newer()
                version = await anyio.to_thread.run_sync(subscriber.refresh)
                print(version, *(xxhash.xxh3_64_hexdigest(each.data) for each in model.values()), flush=True)

    os.environ["XDG_RUNTIME_DIR"] = sys.argv[3]
    anyio.run(main)
"""


class Trainer:
    """Publishes versions of which few values change, and now and then all."""

    def __init__(self) -> None:
        self.weights: dict[str, np.ndarray[Any, Any]] = {
            "weight": np.zeros(WORDS, np.int16),
            "byte": np.zeros(1, np.uint8),
        }
        self.hashes: dict[int, list[str]] = {}
        """Of each version."""
        self._random = np.random.default_rng(0)

    async def publish(self, publisher: WeightPublisher, version: int) -> None:
        weight = self.weights["weight"]
        changed = slice(None) if version % 17 == 0 else self._random.integers(0, WORDS, WORDS // 50)
        weight[changed] += 1
        self.weights["byte"] += 1
        self.hashes[version] = [xxhash.xxh3_64_hexdigest(each.data) for each in self.weights.values()]
        await publisher.publish(self.weights, version)


class Host:
    """The versions that a host of its own has reported."""

    def __init__(self, trainer: Trainer, address: WeightAddress, runtime: Path) -> None:
        self._trainer = trainer
        self._arguments = (pickle.dumps(address).hex(), str(WORDS), str(runtime))
        runtime.mkdir()
        self.version = 0
        self.pid = 0

    async def run(self) -> None:
        """Compare each version with the one that was published, until it has the last."""
        while self.version < VERSIONS:
            with child(HOST, *self._arguments) as process:
                self.pid = process.pid
                while self.version < VERSIONS and (said := await line(process)):
                    version, *hashes = said.split()
                    assert hashes == self._trainer.hashes[int(version)], version
                    self.version = int(version)

    async def reaches(self, version: int) -> None:
        while self.version < version:
            await moment()


@asynccontextmanager
async def relays(address: WeightAddress, count: int) -> AsyncIterator[list[Relay]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(relay(address)) for _ in range(count)]


@pytest.mark.timeout(FAILSAFE_S)
async def test_every_host_has_every_version_as_published_through_cuts_kills_a_joiner_and_a_slow_link(
    tmp_path: Path,
) -> None:
    trainer = Trainer()

    async with (
        WeightPublisher(trainer.weights) as publisher,
        publisher.serve("tcp://127.0.0.1:0") as address,
        relays(address, 2) as (cut, slow),
    ):
        far = replace(address, host="another")
        names = {"steady": far, "cut": cut.address, "killed": far, "joins": far, "slow": slow.address}
        hosts = {name: Host(trainer, where, tmp_path / name) for name, where in names.items()}

        def cut_some() -> None:
            if (len(cut.requested) + len(cut.deltas_requested)) % 20 == 19:
                cut.cut()

        cut.on_request = cut_some

        async with anyio.create_task_group() as tasks:
            for name in ("steady", "cut", "killed", "slow"):
                tasks.start_soon(hosts[name].run)
            for version in range(1, VERSIONS + 1):
                await trainer.publish(publisher, version)
                if version % 10 == 5:
                    slow.flowing = anyio.Event()
                elif version % 10 == 9:
                    slow.flowing.set()
                if version in {12, 31}:
                    os.kill(hosts["killed"].pid, signal.SIGKILL)
                if version == 25:
                    tasks.start_soon(hosts["joins"].run)
                await hosts["steady"].reaches(version)
            slow.flowing.set()

    assert {host.version for host in hosts.values()} == {VERSIONS}
    assert cut.connections > 3
    assert slow.deltas_requested
