"""A run that trains records of two replaying senders, and kills itself by SIGKILL at a given moment.

    python script_of_a_trainer.py FOLDER URL MOMENT NTH

Its weights are the list of what it was trained on. With `shm://` it notes in FOLDER/address where it listens.
"""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
from tests.journal.script_of_a_run import BATCH_TOKENS, CHECKPOINT_EVERY, KillPoint, Trainer

from penstock import Batcher, ReceiveChannel, SendChannel, SinkTrainer, SourceChannel, TrajectoryGroup, drop, source


class Received:
    """Behind the source: every seventh group is of no use."""

    def __init__(self, kill_point: KillPoint) -> None:
        self._kill_point = kill_point

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        async for record in inbox:
            self._kill_point.at("received")
            if int(record.instance_id) % 7:
                await outbox.send(record)
            else:
                drop(record, "filtered", "every seventh")


def main(folder: Path, url: str, moment: str, nth: int) -> None:
    kill_point, checkpoints = KillPoint(moment, nth), folder / "checkpoints"
    pipeline = (
        source(SourceChannel(url, folder / "address", senders=2, capacity=8, capacity_bytes=2**20))
        .then(Received(kill_point))
        .then(Batcher(max_tokens=BATCH_TOKENS))
        .sink(SinkTrainer(Trainer(checkpoints, kill_point), checkpoints=checkpoints, checkpoint_every=CHECKPOINT_EVERY))
    )
    report = anyio.run(pipeline.run)
    assert report.balance.balanced, report
    assert not report.balance.in_flight, report


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
