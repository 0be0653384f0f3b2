"""A pipeline script as a user writes one, which the tests stop by signals.

    python -m tests.processes.script_of_a_stopped_run HOW MOMENT FOLDER

HOW is how the script awaits the run. At MOMENT it says so on stdout, and then waits for a line on stdin, or for ever.
FOLDER keeps the run, and `trained`, a line for each trajectory that was trained; `-` for a run without one.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from tests.processes.worker_stages import Sample

from penstock import (
    GroupId,
    Pipeline,
    ReceiveChannel,
    SendChannel,
    SinkTrainer,
    TrainBatch,
    TrajectoryGroup,
    processes,
    source,
)
from penstock.training import write_checkpoint

GROUPS = 40
STOP_TIMEOUT_S = {"hanging step": 1.0, "blocked stage": 1.0}
"""By moment; long enough for any machine where nothing hangs."""

WAITING = ("waiting", "printing")
"""Moments at which everything is trained and the source waits; in the second the trainer prints when it saves."""


def write_line(what: str) -> None:
    os.write(1, f"{what}\n".encode())


def reached(moment: str) -> None:
    """Print the moment, and wait for a line from the test."""
    if moment == MOMENT:
        write_line(moment)
        sys.stdin.readline()


class Trainer:
    """Writes trained ids to a file, and checkpoints as JSON."""

    def __init__(self, folder: Path | None) -> None:
        self.steps = 0
        self.committed: Mapping[GroupId, int] = {}
        self._folder = folder

    def keep(self, _: Mapping[str, Any], /) -> None:
        reached("opening")

    def step(self, batch: TrainBatch, /) -> Mapping[str, float]:
        self.steps += 1
        if self.steps == 3:
            reached("in step 3")
            if MOMENT == "hanging step":
                write_line(MOMENT)
                threading.Event().wait()
        if self._folder is not None:
            with (self._folder / "trained").open("a") as file:
                file.writelines(f"{each.instance_id} {each.repetition_id}\n" for each in batch.ids)
        if MOMENT in WAITING and self.steps == GROUPS // 2:
            write_line(MOMENT)
        return {}

    def save(self, folder: Path, committed: Mapping[GroupId, int], /) -> Path:
        if MOMENT == "printing":
            sys.stderr.write("saving\n")
            sys.stderr.flush()
        kept = [[*group, mask] for group, mask in committed.items()]
        return write_checkpoint(folder, self.steps, lambda into: _write(into / "state", [self.steps, kept]))

    def resume(self, checkpoint: Path, /) -> None:
        self.steps, kept = json.loads((checkpoint / "state").read_text())
        self.committed = {GroupId(env, instance): mask for env, instance, mask in kept}


def _write(path: Path, what: object) -> None:
    path.write_text(json.dumps(what))


@dataclass(frozen=True)
class Pack:
    """Packs two groups into a batch."""

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrainBatch]) -> None:
        groups = []
        async for group in inbox:
            groups.append(group)
            if len(groups) == 2:
                await outbox.send(TrainBatch.pack(groups))
                groups = []
                if MOMENT == "blocked stage":
                    write_line(MOMENT)
                    while True:  # a signal that comes just before a sleep begins is handled after it
                        time.sleep(0.1)  # noqa: ASYNC251 (what a stage must not do)


@dataclass(frozen=True)
class Numbered(Sample):
    """Sends every group under the same name in every run, and then waits if the moment is one of waiting."""

    waits: bool = False

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        await super().run(outbox)
        if self.waits:
            await anyio.sleep_forever()


def pipeline(folder: Path | None) -> Pipeline:
    trainer = Trainer(folder)
    env = Numbered(GROUPS, waits=MOMENT in WAITING)
    return source(env, on=processes(1)).then(Pack()).sink(SinkTrainer(trainer))


async def run(folder: Path | None) -> None:
    made = pipeline(folder)
    try:
        await made.run(folder=folder, stop_timeout_s=STOP_TIMEOUT_S.get(MOMENT, 600))
    finally:
        report = made.report
        if report is not None:
            write_line(f"ended by: {report.stop_reason}, balanced: {report.balance.balanced}")


async def in_task_group(folder: Path | None) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, folder)
        await anyio.sleep_forever()


async def in_body_of_task_group(folder: Path | None) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.sleep_forever)
        await run(folder)


async def in_asyncio_group(folder: Path | None) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(folder))
        await anyio.sleep_forever()


async def gathered(folder: Path | None) -> None:
    await asyncio.gather(run(folder), anyio.sleep_forever())


async def twice(folder: Path | None) -> None:
    """Run two pipelines at once, each with a folder of its own."""
    assert folder is not None
    for name in ("one", "two"):
        (folder / name).mkdir()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, folder / "one")
        tasks.start_soon(run, folder / "two")


def main(how: str, folder: Path | None) -> None:
    if how == "run_until_complete":
        asyncio.new_event_loop().run_until_complete(run(folder))
    elif how == "anyio.run":
        anyio.run(run, folder)
    else:
        asyncio.run(globals()[how](folder))


MOMENT = sys.argv[2] if __name__ == "__main__" else ""

if __name__ == "__main__":
    main(sys.argv[1], None if sys.argv[3] == "-" else Path(sys.argv[3]))
