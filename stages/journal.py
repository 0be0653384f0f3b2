"""Journal: what was received is on disk before it is trained, so that a run whose every process died can go on.

It stands behind the source, in the trainer's process. First it offers again what a run before received and no
checkpoint holds, then it passes records on as soon as they are written. What was trained is for the trainer's
checkpoint to say, for with the weights of a checkpoint all that was trained after it is gone. Only files of which every
trajectory has ended are deleted: trained in a checkpoint that is on the disk, or dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

import anyio
import anyio.to_thread

from .._pipeline.blocking import enter_in_thread
from .._pipeline.channels.channel import ReceiveChannel, SendChannel
from .._pipeline.chunks import receive_chunks, send_all
from .._pipeline.context import Context, current
from .._pipeline.journal import JournalFiles, LogContents, LogFile, open_journal
from .._pipeline.ledger import Ledger
from .._pipeline.repetition_sets import exclude, mask_of, set_mask
from .._pipeline.telemetry import get_logger
from .._schemas import GroupId, TrajectoryGroup
from .._schemas.numbers import normalize_counts

__all__ = ["Journal"]

T = TypeVar("T")

log = get_logger("penstock.journal")

LEAST_CAPACITY_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Journal:
    """Keep what was received until a checkpoint holds it.

    >>> Journal("runs/7/journal").capacity_bytes
    4294967296

    Args:
        folder: where its files lie; one run at a time has it.
        capacity_bytes: what they may take. 4 GiB are 250,000 trajectories of 1,024 tokens with four columns; it should
            hold what is received between two checkpoints, twice.
        fsync: bring records to the disk before they are passed on. Without it they outlive the death of every process,
            but not that of the machine.

    Raises:
        ValueError: a capacity below 64 KiB.
    """

    folder: str | Path
    capacity_bytes: int = 4 * 2**30
    fsync: bool = False

    def __post_init__(self) -> None:
        normalize_counts(self, "capacity_bytes", least=LEAST_CAPACITY_BYTES)

    def __reduce__(self) -> NoReturn:
        """Whoever is to run in a process is pickled, and this stage belongs where the checkpoints are known."""
        raise TypeError("a Journal runs in the trainer's process: leave out on=processes(…)")

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        """See `Stage`. A record that was passed on is in the journal.

        Raises:
            JournalFull: a record would not fit; it was not passed on.
            JournalInUse: another process writes to the folder.
        """
        context = current()
        async with AsyncExitStack() as stack:
            opened = open_journal(Path(self.folder), capacity_bytes=self.capacity_bytes, fsync=self.fsync)
            files = await enter_in_thread(stack, opened)
            writing = _Writing(files, context)  # meanwhile the trainer has restored the ledger
            stack.enter_context(context.ledger.on_checkpoint(writing.kept.forget))
            await writing.offer_again(outbox)
            async for records in receive_chunks(inbox):
                await writing.write(records)
                await send_all(outbox, records)


class _Kept:
    """Which trajectories each volume is kept for. Decides; touches no file."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._waiting: dict[LogFile, dict[GroupId, int]] = {}
        """Repetitions of each group that are not known to have ended, as a bit mask."""

    def note(self, volume: LogFile, records: Sequence[TrajectoryGroup]) -> None:
        """`records` lie in `volume`."""
        waiting = self._waiting.setdefault(volume, {})
        for record in records:
            waiting[record.id] = waiting.get(record.id, 0) | mask_of(record.repetition_ids.tolist())

    def forget(self, committed: Mapping[GroupId, int]) -> None:
        """A checkpoint holds `committed`: these need no journal any more, and neither does what was dropped."""
        for waiting in self._waiting.values():
            for group, mask in list(waiting.items()):  # what was trained since would have to be again, without it
                set_mask(waiting, group, mask & ~committed.get(group, 0) & self._ledger.known(group))

    def take_done(self) -> list[LogFile]:
        """Volumes that are kept for nothing: the caller deletes them."""
        done = [volume for volume, waiting in self._waiting.items() if not waiting]
        for volume in done:
            del self._waiting[volume]
        return done


class _Writing:
    """A journal while a run uses it."""

    def __init__(self, files: JournalFiles, context: Context) -> None:
        self.kept = _Kept(context.ledger)
        self._files = files
        self._context = context
        self._trained = context.ledger.committed
        """What the checkpoint holds with which this run began."""
        self._thread = anyio.CapacityLimiter(1)

    # -- of the runs before ------------------------------------------------------------------------------------------

    async def offer_again(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        """Send what was received before and is not trained, in the order in which it came."""
        offered = 0
        for volume in list(self._files.volumes):
            reading = await self._in_thread(partial(self._files.read, volume))
            self._tell(volume, reading)
            kept = _those(exclude(record, self._trained.get(record.id, 0)) for record in reading.records)
            del reading
            self.kept.note(volume, kept)
            again = self._again(kept)
            del kept
            offered += sum(map(len, again))
            await send_all(outbox, again)
        await self._delete()
        if offered:
            log.info("journal_offered_again", trajectories=offered)
        self._context.metrics.total("journal/replayed", offered)

    def _again(self, records: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """What of `records` a source has not offered by now; it enters the books of this run."""
        again = []
        for record in records:
            fresh = exclude(record, self._context.ledger.known(record.id))
            if fresh is not None:
                self._context.ledger.take_over(fresh)
                again.append(fresh)
        return again

    def _tell(self, volume: LogFile, reading: LogContents) -> None:
        """What could not be read is lost, and nobody can say whose it was."""
        if reading.torn is not None:
            cut = reading.torn.last - reading.torn.first
            log.warning("journal_tail_cut", path=str(volume.path), at=reading.torn.first, bytes=cut)
        for first, last in reading.damage:
            log.error("journal_damaged", path=str(volume.path), at=first, bytes=last - first)
        self._context.metrics.total("journal/damaged_bytes", sum(last - first for first, last in reading.damage))

    # -- of this run -------------------------------------------------------------------------------------------------

    async def write(self, records: Sequence[TrajectoryGroup]) -> None:
        """Bring `records` into the journal, when there is room again of what has ended."""
        await self._delete()
        volume = await self._in_thread(partial(self._files.append, records))
        self.kept.note(volume, records)
        self._context.metrics.gauge("journal/bytes", self._files.nbytes)

    async def _delete(self) -> None:
        if done := self.kept.take_done():
            await self._in_thread(partial(self._files.delete, done))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(work, limiter=self._thread)


def _those(records: Iterable[TrajectoryGroup | None]) -> list[TrajectoryGroup]:
    return [record for record in records if record is not None]
