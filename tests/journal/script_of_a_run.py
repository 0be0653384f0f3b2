"""A run with journal and checkpoints that kills itself by SIGKILL at a given moment, or runs to its end.

    python script_of_a_run.py FOLDER FIRST LAST MOMENT NTH

Samples the prompts FIRST to LAST in a worker, which dies with this process. Everything that has passed the journal is
noted in FOLDER/passed, with a plain write behind which nothing waits. The trainer's weights are the list of what it
was trained on, so that a checkpoint says itself what happened to it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import anyio
import msgspec

from penstock import (
    Batcher,
    GroupId,
    Journal,
    ReceiveChannel,
    SendChannel,
    SinkTrainer,
    TrainBatch,
    TrajectoryGroup,
    drop,
    processes,
    source,
)
from penstock._pipeline.util.appending import append_whole
from penstock.testing import group
from penstock.training import latest_checkpoint, write_checkpoint

CAPACITY_BYTES = 2**17
"""Of the journal: a volume holds about 20 groups."""

GROUP_TOKENS = 16
BATCH_TOKENS = 4 * GROUP_TOKENS
CHECKPOINT_EVERY = 3


@dataclass(frozen=True)
class Sample:
    first: int
    last: int

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        for number in range(self.first, self.last):
            lengths = [GROUP_TOKENS // 2 - 2] * 2
            await outbox.send(group(instance_id=str(number), seed=number, completion_lengths=lengths))


class KillPoint:
    """Kills this process when the moment has come that is asked for."""

    def __init__(self, moment: str, nth: int) -> None:
        self._moment = moment
        self._left = nth

    def at(self, moment: str, before: Callable[[], object] = lambda: None) -> None:
        """Kill this process if `moment` is the chosen one, after a call of `before`."""
        if moment == self._moment:
            self._left -= 1
            if not self._left:
                before()
                os.kill(os.getpid(), signal.SIGKILL)


class Note:
    """Behind the journal: notes what passes; every seventh group is of no use."""

    def __init__(self, kill_point: KillPoint, path: Path) -> None:
        self._kill_point = kill_point
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        async for record in inbox:
            os.write(self._fd, f"{record.instance_id}\n".encode())
            self._kill_point.at("journaled")
            if int(record.instance_id) % 7:
                await outbox.send(record)
            else:
                drop(record, "filtered", "every seventh")


class State(msgspec.Struct):
    trained: list[str]
    steps: int
    committed: list[tuple[str, str, int]]


class Trainer:
    def __init__(self, folder: Path, kill_point: KillPoint) -> None:
        self._kill_point = kill_point
        checkpoint = latest_checkpoint(folder)
        state = State([], 0, [])
        if checkpoint is not None:
            state = msgspec.json.decode((checkpoint / "state").read_bytes(), type=State)
        self.trained, self.steps = state.trained, state.steps
        self.committed: Mapping[GroupId, int] = {GroupId(env, name): mask for env, name, mask in state.committed}

    def step(self, batch: TrainBatch, /) -> dict[str, float]:
        self._kill_point.at("stepping")
        self.trained = [*self.trained, *(packed.id.instance_id for packed in batch.groups)]
        self.steps += 1
        self._kill_point.at("stepped")
        return {}

    def save(self, folder: Path, committed: Mapping[GroupId, int], /) -> Path:
        self._kill_point.at("saving")
        path = write_checkpoint(folder, self.steps, lambda into: self._write(into, committed))
        self._kill_point.at("saved")
        return path

    def _write(self, into: Path, committed: Mapping[GroupId, int]) -> None:
        state = State(self.trained, self.steps, [(of.env, of.instance_id, mask) for of, mask in committed.items()])
        (into / "state").write_bytes(msgspec.json.encode(state))
        self._kill_point.at("half saved")


def tear_writes(kill_point: KillPoint) -> None:
    """Patch the system calls of a journal: a kill in a write leaves a part of an entry, in a deletion some files."""
    write, unlink = os.write, Path.unlink

    def torn(fd: int, data: memoryview) -> int:
        kill_point.at("writing", before=lambda: write(fd, data[: len(data) // 2]))
        return write(fd, data)

    def unlinked(path: Path, *, missing_ok: bool = False) -> None:
        of_journal = ".volume-" in path.name
        kill_point.at("deleting" if of_journal else "")
        unlink(path, missing_ok=missing_ok)
        kill_point.at("deleted" if of_journal else "")

    appends = sys.modules[append_whole.__module__]
    os_of_appends = type("os", (), {**vars(os), "write": staticmethod(torn)})
    appends.os = os_of_appends  # type: ignore[attr-defined]
    Path.unlink = unlinked  # type: ignore[method-assign,assignment]


def main(folder: Path, first: int, last: int, moment: str, nth: int) -> None:
    kill_point = KillPoint(moment, nth)
    tear_writes(kill_point)
    checkpoints = folder / "checkpoints"
    pipeline = (
        source(Sample(first, last), on=processes(1))
        .then(Journal(folder / "journal", capacity_bytes=CAPACITY_BYTES))
        .then(Note(kill_point, folder / "passed"))
        .then(Batcher(max_tokens=BATCH_TOKENS))
        .sink(SinkTrainer(Trainer(checkpoints, kill_point), checkpoints=checkpoints, checkpoint_every=CHECKPOINT_EVERY))
    )
    report = anyio.run(pipeline.run)
    assert report.stop_reason == "end of stream", report
    assert report.balance.balanced, report


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
