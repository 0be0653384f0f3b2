"""The programs of a round's processes: trainers, senders, flooders, holders of namespaces. Each dies with the driver.

    python -m chaos.actors '{"role": "sender", …}'

A sender and a source send the numbers below `count - 1` at a fixed pace, and the last one when the file `finish`
exists, so that the stream cannot end while faults are injected.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import anyio
import msgspec
import structlog

from penstock import (
    Batcher,
    GroupId,
    Journal,
    ReceiveChannel,
    Report,
    SendChannel,
    SinkTrainer,
    SourceChannel,
    TrainBatch,
    TrajectoryGroup,
    current,
    processes,
    source,
)
from penstock._pipeline.workers.worker import die_with
from penstock.accounting import CommittedPrompts
from penstock.channels import ChannelKey, connect_with_replay
from penstock.training import latest_checkpoint, write_checkpoint

from .flooder import flood
from .records import check_batch, check_record, record_of

__all__ = ["Found", "Spec", "read_trained"]

PACE_S = 0.02
"""Seconds between four records of a sender."""

BATCH_TOKENS, CHECKPOINT_EVERY, CAPACITY_BYTES = 2048, 3, 2**19

RESTARTS = 10**9

AWAITED_S = 300.0
"""Seconds that a member or a trainer may be absent: longer than a round takes."""


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of one process."""

    role: Literal["trainer", "sender", "holder", "flooder"]
    parent: int
    """Process id of the driver."""
    place: str
    """The folder of the round."""
    source: Literal["workers", "channel"] = "channel"
    """The trainer's source: worker processes of its own, or senders that outlive it."""
    url: str = "shm://"
    key: str | None = None
    """The file of the key."""
    lane: int = 0
    lanes: int = 1
    count: int = 0
    """Records of each lane."""
    heartbeat_timeout_s: float = 2.0

    @property
    def folder(self) -> Path:
        """Return the folder of the round."""
        return Path(self.place)

    @property
    def finish(self) -> Path:
        """The file that exists once no more faults are injected."""
        return self.folder / "finish"

    @property
    def loaded_key(self) -> ChannelKey | None:
        """Return the key of the channel."""
        return None if self.key is None else ChannelKey.load(self.key)


class Found(msgspec.Struct, frozen=True):
    """The report of a trainer that has ended by itself."""

    stop_reason: str
    balanced: bool
    in_flight: int
    lost: dict[str, int]
    """Trajectories by reason, of the last process that trained."""


class Trained(msgspec.Struct):
    """The weights: the names of all trained records, in order."""

    steps: int
    names: list[GroupId]
    committed: dict[str, Any]


def read_trained(folder: Path) -> list[GroupId]:
    """Return the names in the newest checkpoint of a run folder: none where there is no checkpoint."""
    checkpoint = latest_checkpoint(folder / "checkpoints")
    return [] if checkpoint is None else _read(checkpoint).names


def _read(checkpoint: Path) -> Trained:
    return msgspec.json.decode((checkpoint / "state").read_bytes(), type=Trained)


# -- sending -----------------------------------------------------------------------------------------------------------


async def send_all(spec: Spec, lane: int, send: Callable[[TrajectoryGroup], Any]) -> None:
    """Send every record of a lane, the last one when the round comes to its end."""
    finish = anyio.Path(spec.finish)
    for number in range(spec.count):
        if number % 4 == 0:
            await anyio.sleep(PACE_S)
        while number == spec.count - 1 and not await finish.exists():  # noqa: ASYNC110 (another process makes it)
            await anyio.sleep(PACE_S)
        await send(record_of(lane, number))


async def run_sender(spec: Spec) -> None:
    """Send a lane to the present trainer."""
    where: str | Path = spec.folder / "address" if spec.url == "shm://" else spec.url
    name, reconnect_timeout_s, heartbeat_timeout_s = f"sender {spec.lane}", AWAITED_S, spec.heartbeat_timeout_s
    async with connect_with_replay(
        where,
        name=name,
        reconnect_timeout_s=reconnect_timeout_s,
        key=spec.loaded_key,
        heartbeat_timeout_s=heartbeat_timeout_s,
    ) as outbox:
        await send_all(spec, spec.lane, outbox.send)


@dataclass(frozen=True)
class Make:
    """A source in worker processes: each worker sends a lane, from the beginning after each restart."""

    spec: Spec

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        """See `Source`."""
        await send_all(self.spec, current().worker.index, outbox.send)


# -- training ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """A stage that compares every record with the one that was sent."""

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        """See `Stage`."""
        async for record in inbox:
            check_record(record)
            await outbox.send(record)


class Trainer:
    """Records the names of its batches, so that a checkpoint lists every trained record."""

    def __init__(self) -> None:
        self.steps = 0
        self.committed: Mapping[GroupId, int] = {}
        self._names: list[GroupId] = []

    def step(self, batch: TrainBatch, /) -> dict[str, float]:
        """Check and record a batch."""
        check_batch(batch)
        self._names += [packed.id for packed in batch.groups]
        self.steps += 1
        return {"loss": 0.0}

    def save(self, folder: Path, committed: CommittedPrompts, /) -> Path:
        """See `Checkpointed`."""
        state = msgspec.json.encode(Trained(self.steps, self._names, dict(committed.state_dict())))
        return write_checkpoint(folder, self.steps, lambda into: _write(into / "state", state))

    def keep(self, state: Mapping[str, Any], /) -> None:
        """Ignore the state of stages: none of them has any."""

    def resume(self, checkpoint: Path, /) -> None:
        """See `Resumable`."""
        trained = _read(checkpoint)
        self.steps, self._names = trained.steps, trained.names
        self.committed = CommittedPrompts.of_state(trained.committed)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


async def run_trainer(spec: Spec) -> None:
    """Train until the stream ends, and write a report."""
    trainer = SinkTrainer(Trainer(), checkpoint_every=CHECKPOINT_EVERY, keep_checkpoints=2)
    if spec.source == "workers":
        begun = source(Make(spec), on=processes(spec.lanes, restarts=RESTARTS)).then(
            Check(), on=processes(1, restarts=RESTARTS), capacity_bytes=CAPACITY_BYTES
        )
    else:
        begun = source(_channel(spec)).then(Check())
    pipeline = (
        begun.then(Journal(spec.folder / "journal"), capacity_bytes=CAPACITY_BYTES)
        .then(Check())
        .then(Batcher(max_tokens=BATCH_TOKENS))
        .sink(trainer)
    )
    report = await pipeline.run(folder=spec.folder / "run")
    _write(spec.folder / "report", msgspec.json.encode(_found(report)))


def _channel(spec: Spec) -> SourceChannel:
    return SourceChannel(
        spec.url,
        address=spec.folder / "address" if spec.url == "shm://" else None,
        senders=spec.lanes,
        absence_timeout_s=AWAITED_S,
        capacity_bytes=CAPACITY_BYTES,
        key=spec.loaded_key,
        heartbeat_timeout_s=spec.heartbeat_timeout_s,
    )


def _found(report: Report) -> Found:
    balance = report.balance
    return Found(report.stop_reason, balance.balanced, balance.in_flight, dict(balance.reasons.get("lost", {})))


# -- processes ---------------------------------------------------------------------------------------------------------


async def hold(_: Spec) -> None:
    """Keep the network namespace of this process alive."""
    print("held", flush=True)
    await anyio.sleep_forever()


async def run_flooder(spec: Spec) -> None:
    """Flood the trainer, and die."""
    assert spec.loaded_key is not None  # noqa: S101 (a port has one)
    flood(spec.url, spec.loaded_key, str(spec.lane))


ROLES = {"trainer": run_trainer, "sender": run_sender, "holder": hold, "flooder": run_flooder}


def main() -> None:
    """Run the role that the first argument describes."""
    spec = msgspec.json.decode(sys.argv[1], type=Spec)
    die_with(spec.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the driver, and this process dies with it
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    anyio.run(ROLES[spec.role], spec)


if __name__ == "__main__":
    main()
