"""One end of a channel, or of published weights: on a host of `network`, or on this one.

    python script_of_a_host.py ROLE '{"url": "tcp://10.231.1.2:5555", …}'

Prints a line for what happens, `trained 7` or `version 7`, and one that begins with `log` for each warning of the log.
Reads commands from stdin, one a line, and ends when that ends.
"""

from __future__ import annotations

import logging
import pickle
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import structlog
from tests.processes.worker_sinks import Commit
from tests.processes.worker_stages import Double, Sample

from penstock import (
    Batcher,
    GroupId,
    SinkTrainer,
    SourceChannel,
    TrainBatch,
    TrajectoryGroup,
    joining,
    source,
)
from penstock._pipeline.workers import workers
from penstock._pipeline.workers.join import Program, join
from penstock.channels import ChannelKey, RemoteSender, connect, connect_with_replay, serve
from penstock.errors import MemberAbsent, PeerClosed, PeerLost, PenstockError
from penstock.testing import group
from penstock.training import write_checkpoint
from penstock.weights import WeightAddress, WeightPublisher, WeightSubscriber

KEY = ChannelKey(bytes(range(32)))


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def log_event(_: Any, __: str, event: Any) -> str:
    """Render an event as a line."""
    details = {name: value for name, value in event.items() if name != "event"}
    return f"log {event['event']} {details}"


async def commands() -> AsyncIterator[str]:
    while line := await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
        yield line.strip()


# -- workers -----------------------------------------------------------------------------------------------------------


async def double(url: str, key: str, heartbeat_timeout_s: float) -> None:
    """Double the rewards of 20 groups in a worker that joins; print how the run ended."""
    workers.WORKER_HEARTBEAT_TIMEOUT_S = heartbeat_timeout_s
    on = joining(expected=1, url=url, key=key, digest="of Double")
    report = await source(Sample(20)).then(Double(), on=on).sink(Commit()).run()
    say("ended", report.balance.ended)


async def worker(url: str, key: str) -> None:
    """Join, and print what happens, and the error at the end."""
    program = Program(make_stage=lambda _: Double(), digest="of Double")
    try:
        await join(url, program, key=ChannelKey.load(key), name="far", tell=partial(say, "told"))
    except PenstockError as error:
        say(type(error).__name__, error)


# -- records -----------------------------------------------------------------------------------------------------------


class Trainer:
    """Prints each record that it trains, and has a checkpoint written after every step."""

    def __init__(self) -> None:
        self.steps = 0
        self.committed: Mapping[GroupId, int] = {}

    def step(self, batch: TrainBatch) -> dict[str, float]:
        for packed in batch.groups:
            say("trained", packed.id.env, packed.id.instance_id)
        self.steps += 1
        return {}

    def save(self, folder: Path, committed: Mapping[GroupId, int]) -> Path:
        del committed
        return write_checkpoint(folder, self.steps, lambda _: None)


async def train(url: str, folder: str, **options: Any) -> None:
    """Train every record that senders replay; print how the run ended."""
    sink = SinkTrainer(Trainer(), checkpoints=Path(folder) / "checkpoints", checkpoint_every=1, keep_checkpoints=2)
    pipeline = source(SourceChannel(url, key=KEY, **options)).then(Batcher(max_tokens=16)).sink(sink)
    report = await pipeline.run()
    say("ended", report.stop_reason)


def record(name: str, number: int, tokens: int) -> TrajectoryGroup:
    return group(env=name, instance_id=str(number), completion_lengths=[tokens, tokens])


async def replay(url: str, name: str, **options: Any) -> None:
    """Send as many records as each command says, and keep them until they are saved."""
    number = 0
    async with connect_with_replay(url, name=name, key=KEY, **options) as outbox:
        async for count in commands():
            for _ in range(int(count)):
                await outbox.send(record(name, number, 2))
                number += 1
            say("sent", number)


async def receive(url: str, **options: Any) -> None:
    """Print every record, and the error or the end of the stream."""
    try:
        async with serve(url, TrajectoryGroup, key=KEY, **options) as inbox:
            say("url", inbox.url)
            async for received in inbox:
                say("received", received.env, received.instance_id)
        say("ended")
    except MemberAbsent as error:
        say("absent", error)


async def send(url: str, name: str, tokens: int = 2, *, told: bool = False, **options: Any) -> None:
    """Send as many records as each command says; print the error of the connection as soon as there is one.

    `told` has it connect at the first command, so that the time of its imports is over.
    """
    number = 0
    if told:
        say("ready")
        await anext(commands())

    async def watch(outbox: RemoteSender[TrajectoryGroup]) -> None:
        await outbox.wait_failed()
        say("failed", outbox.failure)
        tasks.cancel_scope.cancel()

    async with connect(url, TrajectoryGroup, name=name, key=KEY, **options) as outbox:
        say("connected")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch, outbox)
            async for count in commands():
                for _ in range(int(count)):
                    await outbox.send(record(name, number, tokens))
                    number += 1
                say("sent", number)
            tasks.cancel_scope.cancel()


# -- weights -----------------------------------------------------------------------------------------------------------


def weights(version: int, megabytes: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"weight": np.full(megabytes * 2**18, version, np.float32)}


async def publish(url: str, megabytes: int = 1, **options: Any) -> None:
    """Publish the version that each command names."""
    async with (
        WeightPublisher(weights(0, megabytes)) as publisher,
        publisher.serve(url, key=KEY, **options) as address,
    ):
        say("address", pickle.dumps(replace(address, host="another")).hex())
        async for command in commands():
            if command == "pause":
                async with publisher.paused():
                    say("paused", len(publisher.subscribers))
            else:
                await publisher.publish(weights(int(command), megabytes), int(command))
                say("published", command, len(publisher.subscribers))


async def sample(address: str, megabytes: int = 1, url: str = "") -> None:
    """Print every version that arrives, and the error that ends it."""
    found: WeightAddress = pickle.loads(bytes.fromhex(address))  # noqa: S301 (our own)
    model = weights(-1, megabytes)
    with suppress(PeerClosed):
        try:
            async with WeightSubscriber(replace(found, url=url or found.url)) as subscriber:
                subscriber.attach(model)
                say("attached")
                while True:
                    await subscriber.newer()
                    async with subscriber.sampling():
                        version = await anyio.to_thread.run_sync(subscriber.refresh)
                        assert (model["weight"] == version).all()
                    say("version", version)
        except PeerLost as error:
            say("lost", error)


ROLES: dict[str, Callable[..., Awaitable[None]]] = {
    "train": train,
    "replay": replay,
    "receive": receive,
    "double": double,
    "worker": worker,
    "send": send,
    "publish": publish,
    "sample": sample,
}


def main() -> None:
    structlog.configure(
        processors=[log_event],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stdout),
    )

    async def run() -> None:
        await ROLES[sys.argv[1]](**msgspec.json.decode(sys.argv[2]))

    anyio.run(run)


if __name__ == "__main__":
    main()
