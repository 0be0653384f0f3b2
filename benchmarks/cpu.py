"""CPU time of one group in its producer, and in the consumer that packs it, to compare profiles with.

    python -m benchmarks.cpu

Waiting does not count, so on a shared machine this is more precise than a rate.
"""

from __future__ import annotations

import multiprocessing
import time

import anyio
import msgspec

from penstock import TrajectoryGroup
from penstock.channels import connect, serve
from penstock.records import Packer

from .records import Checker, batch_tokens, make_groups

GROUPS = 20_000
GROUP, TOKENS = 8, 1024


def _produce(url: str) -> None:
    anyio.run(_send, url)


async def _send(url: str) -> None:
    groups = make_groups(0, group=GROUP, tokens=TOKENS)
    async with connect(url, TrajectoryGroup) as outbox:
        began = time.process_time()
        for number in range(GROUPS):
            await outbox.send(msgspec.structs.replace(groups[number % len(groups)], instance_id=str(number)))
        print(f"producer: {(time.process_time() - began) / GROUPS * 1e6:.1f} µs a group")


async def _receive() -> None:
    packer, checker = Packer(batch_tokens(GROUP, TOKENS)), Checker(producers=1, group=GROUP, tokens=TOKENS)
    async with serve("shm://", TrajectoryGroup) as inbox:
        producer = multiprocessing.get_context("spawn").Process(target=_produce, args=(inbox.url,))
        producer.start()
        packer.add(await inbox.receive())
        began, wall = time.process_time(), time.perf_counter()
        async for group in inbox:
            if not packer.fits(group):
                checker.check(packer.pack())
            packer.add(group)
        used, took = time.process_time() - began, time.perf_counter() - wall
        print(f"consumer: {used / GROUPS * 1e6:.1f} µs a group; {GROUPS * GROUP / took:,.0f} trajectories/s")
        producer.join()


if __name__ == "__main__":
    anyio.run(_receive)
