"""Open channels and weights with a given number of free file descriptors: they open, or report that these are too few.

    python -m tests.limits.script_of_descriptors WHAT LEFT…

Each number is tried by a child of its own, for ZeroMQ opens its own descriptors once. Prints lines `number: text`.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import numpy.random

from penstock import TrajectoryGroup
from penstock.channels import connect, serve
from penstock.errors import OutOfFileDescriptors
from penstock.testing import group
from penstock.weights import WeightAddress, WeightPublisher, WeightSubscriber

TENSORS = {"weight": np.zeros(4, np.float32)}

LOOPBACK = "tcp://127.0.0.1:0"

ENOUGH = 100

HUNG_S = 30
"""End a child that takes longer by SIGALRM, which is in its exit status."""


def leave(count: int) -> None:
    """Lower the limit so that this process can open `count` more files."""
    taken = os.open(os.devnull, os.O_RDONLY)
    os.close(taken)
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + count, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


async def receiving(url: str, left: int) -> None:
    leave(left)
    async with serve(url, TrajectoryGroup) as inbox:
        leave(ENOUGH)
        async with connect(inbox.url, TrajectoryGroup) as outbox:
            await outbox.send(group())
            await inbox.receive()


async def sending(url: str, left: int) -> None:
    leave(left)
    async with connect(url, TrajectoryGroup) as outbox:
        await outbox.send(group())


async def serving_weights(left: int) -> None:
    async with WeightPublisher(TENSORS) as publisher:
        leave(left)
        async with publisher.serve(LOOPBACK) as address:
            leave(ENOUGH)
            async with WeightSubscriber(replace(address, host="another")):
                pass


async def mirroring(address: WeightAddress, left: int) -> None:
    leave(left)
    async with WeightSubscriber(address) as subscriber:
        await subscriber.newer()


async def publisher_elsewhere(writer: int) -> None:
    async with WeightPublisher(TENSORS) as publisher, publisher.serve(LOOPBACK) as address:
        await publisher.publish(TENSORS, 0)
        os.write(writer, pickle.dumps(replace(address, host="another")))
        await anyio.sleep_forever()


async def receiver(url: str, writer: int) -> None:
    async with serve(url, TrajectoryGroup) as inbox:
        os.write(writer, pickle.dumps(inbox.url))
        await inbox.receive()
        await anyio.sleep_forever()


@contextmanager
def elsewhere(work: Callable[[int], Awaitable[None]]) -> Iterator[Any]:
    """Run `work` in another process, so that this one has nothing of ZeroMQ yet; yield what it writes."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(HUNG_S)
        anyio.run(work, writer)
    try:
        yield pickle.loads(os.read(reader, 4096))  # noqa: S301 (our own)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


async def weights(left_to_publish: int, left_to_subscribe: int) -> None:
    leave(left_to_publish)
    async with WeightPublisher(TENSORS) as publisher:
        await publisher.publish(TENSORS, 0)
        leave(left_to_subscribe)
        async with WeightSubscriber(publisher.url) as subscriber:
            subscriber.attach({"weight": np.ones(4, np.float32)})
            subscriber.refresh()


def report(left: int, outcome: str) -> None:
    os.write(sys.stdout.fileno(), f"{left}: {outcome}\n".encode())


async def attempt(work: Callable[[int], Awaitable[None]], left: int) -> None:
    await anyio.to_thread.run_sync(group)  # threads, and what a record needs, are there before the limit is
    try:
        await work(left)
    except OutOfFileDescriptors as error:
        report(left, str(error))
    else:
        report(left, "opened")


def try_with(what: str, left: int) -> None:
    action, _, transport = what.partition(" ")
    url = {"shm": "shm://", "tcp": LOOPBACK}.get(transport, "")
    if action == "connect":
        with elsewhere(partial(receiver, url)) as served:
            anyio.run(attempt, partial(sending, served), left)
    elif action == "mirror":
        with elsewhere(publisher_elsewhere) as address:
            anyio.run(attempt, partial(mirroring, address), left)
    elif what == "serve weights":
        anyio.run(attempt, serving_weights, left)
    elif action == "serve":
        anyio.run(attempt, partial(receiving, url), left)
    elif action == "publish":
        anyio.run(attempt, lambda left: weights(left, ENOUGH), left)
    else:
        anyio.run(attempt, lambda left: weights(ENOUGH, left), left)


def main(what: str, numbers: list[int]) -> None:
    for left in numbers:
        child = os.fork()
        if not child:
            signal.alarm(HUNG_S)
            try_with(what, left)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            report(left, f"ended with {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main(sys.argv[1], [int(number) for number in sys.argv[2:]])
