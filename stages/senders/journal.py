"""Journal: received records are on disk before they are trained, so that a run can resume after all processes died.

It runs behind the source, in the trainer's process. First it replays the records that an earlier run received and no
checkpoint contains; then it passes records on as soon as they are written. The trainer's checkpoint alone decides which
trajectories were trained, because resuming from it loses all later training. A file is deleted when all its
trajectories have ended: trained in a checkpoint that is on the disk, or dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

import anyio
import anyio.to_thread

from ..._pipeline.accounting.repetition_sets import exclude
from ..._pipeline.accounting.retention import Retention
from ..._pipeline.accounting.telemetry import get_logger
from ..._pipeline.channels.channel import ReceiveChannel, SendChannel
from ..._pipeline.channels.chunks import receive_chunks, send_all
from ..._pipeline.durability.journal import JournalFiles, LogContents, LogFile, open_journal
from ..._pipeline.graph.context import Context, current
from ..._pipeline.graph.stage_info import StageInfo
from ..._pipeline.util.blocking import enter_in_thread
from ..._schemas import GroupId, TrajectoryGroup
from ..._schemas.numbers import normalize_counts

T = TypeVar("T")

log = get_logger("penstock.journal")

LEAST_CAPACITY_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Journal:
    """Keep received records until a checkpoint contains them.

    >>> Journal("runs/7/journal").capacity_bytes
    4294967296

    Args:
        folder: folder of its files; one run at a time may use it.
        capacity_bytes: bound on their size. 4 GiB are 250,000 trajectories of 1,024 tokens with four columns; it should
            be twice the size of the records between two checkpoints.
        fsync: sync records to the disk before they are passed on. Without it they survive the death of every process,
            but not that of the machine.

    Raises:
        InvalidConfig: a capacity below 64 KiB.
    """

    folder: str | Path
    capacity_bytes: int = 4 * 2**30
    fsync: bool = False

    def __post_init__(self) -> None:
        normalize_counts(self, "capacity_bytes", least=LEAST_CAPACITY_BYTES)

    def __reduce__(self) -> NoReturn:
        """Refuse pickling: a stage in another process is pickled, and this one must run beside the trainer."""
        raise TypeError("a Journal runs in the trainer's process: leave out on=processes(…)")

    def stage_info(self) -> StageInfo:
        """State that no column is added, and that records are kept until they are saved."""
        return StageInfo(fills_columns=(), follows_trajectories=True)

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        """Run the stage; see `Stage`. A record that was passed on is in the journal.

        Raises:
            JournalFull: a record would not fit; it was not passed on.
            JournalInUse: another process writes to the folder.
        """
        context = current()
        async with AsyncExitStack() as stack:
            opened = open_journal(Path(self.folder), capacity_bytes=self.capacity_bytes, fsync=self.fsync)
            files = await enter_in_thread(stack, opened)
            writing = _Writing(files, context)  # meanwhile the trainer has restored the ledger
            stack.enter_context(context.ledger.on_checkpoint(writing.on_checkpoint))
            await writing.replay(outbox)
            async for records in receive_chunks(inbox):
                await writing.write(records)
                await send_all(outbox, records)


class _Writing:
    """A journal while a run uses it."""

    def __init__(self, files: JournalFiles, context: Context) -> None:
        self._retention = Retention[LogFile]()
        """The files that are needed."""
        self._files = files
        self._context = context
        self._trained = context.ledger.committed
        """Trajectories in the checkpoint that this run began with."""
        self._thread = anyio.CapacityLimiter(1)

    def on_checkpoint(self, committed: Mapping[GroupId, int]) -> None:
        """Note the trajectories that a checkpoint contains."""
        self._retention.save_checkpoint(committed, self._context.ledger)

    # -- records of earlier runs ---------------------------------------------------------------------------------------

    async def replay(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        """Send records that were received before and are not trained, in the order of their arrival."""
        replayed = 0
        for file in list(self._files.volumes):
            contents = await self._in_thread(partial(self._files.read, file))
            self._report_damage(file, contents)
            untrained = (exclude(record, self._trained.get(record.id, 0)) for record in contents.records)
            kept = [record for record in untrained if record is not None]
            del contents
            self._keep(file, kept)
            fresh = self._admit(kept)
            del kept
            replayed += sum(map(len, fresh))
            await send_all(outbox, fresh)
        await self._delete()
        if replayed:
            log.info("journal_replayed", trajectories=replayed)
        self._context.metrics.total("journal/replayed", replayed)

    def _admit(self, records: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """Admit to the ledger, and return, the part of `records` that no source has sent in this run."""
        admitted = []
        for record in records:
            fresh = exclude(record, self._context.ledger.trajectories.known(record.id))
            if fresh is not None:
                self._context.ledger.hand_over(fresh)
                admitted.append(fresh)
        return admitted

    def _report_damage(self, file: LogFile, contents: LogContents) -> None:
        """Log and count bytes that could not be read; their trajectories are unknown."""
        if contents.torn is not None:
            truncated = contents.torn.last - contents.torn.first
            log.warning("journal_tail_truncated", path=str(file.path), at=contents.torn.first, bytes=truncated)
        for first, last in contents.damage:
            log.error("journal_damaged", path=str(file.path), at=first, bytes=last - first)
        self._context.metrics.total("journal/damaged_bytes", sum(last - first for first, last in contents.damage))

    # -- records of this run -------------------------------------------------------------------------------------------

    async def write(self, records: Sequence[TrajectoryGroup]) -> None:
        """Write `records`, after deleting files whose trajectories have all ended."""
        await self._delete()
        file = await self._in_thread(partial(self._files.append, records))
        self._keep(file, records)
        self._context.metrics.gauge("journal/bytes", self._files.nbytes)

    def _keep(self, file: LogFile, records: Sequence[TrajectoryGroup]) -> None:
        for record in records:
            self._retention.keep_record(file, record)

    async def _delete(self) -> None:
        """Delete the files whose trajectories have all ended."""
        if done := [file for file in self._files.volumes if file not in self._retention]:
            await self._in_thread(partial(self._files.delete, done))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(work, limiter=self._thread)
