"""GroupAssembler: pieces of groups to groups, by id, in whatever order and as often as they come.

An advantage compares the completions of one prompt, so they must be together before it is taken, and where they were
sampled apart they come apart. Which piece belongs where, and which group is to leave, `pipeline.group_buffer` says;
this stage waits, joins what leaves, and does with stragglers what it was told to.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import anyio
import msgspec

from .._pipeline.channels.channel import ReceiveChannel, SendChannel
from .._pipeline.chunks import receive_chunks, send_all
from .._pipeline.context import current, drop
from .._pipeline.flush import flush_cancels
from .._pipeline.group_buffer import Flush, GroupBuffer, Why
from .._pipeline.repetition_sets import iter_bits, trajectories
from .._pipeline.stage_info import StageInfo
from .._pipeline.telemetry import get_logger
from .._schemas import InvalidRecord, TrainBatch, TrajectoryGroup
from .._schemas.numbers import normalize_counts, normalize_numbers

__all__ = ["GroupAssembler"]

log = get_logger("penstock.group_assembler")

Stragglers: TypeAlias = Literal["drop", "shrink", "wait"]

CLOSED_PER_PLACE = 16
"""Groups that are remembered to have left, for each that may wait: one takes some 250 bytes. What comes later than so
many others have closed is not known to be late."""

REASONS: dict[Why, str] = {
    "overdue": "incomplete at its deadline",
    "evicted": "incomplete when others needed its room",
    "left over": "incomplete at the end of the stream",
    "late": "came after its group had left",
    "beyond": "a repetition beyond the size of its group",
    "duplicate": "duplicate",
}
"""What the ledger is told."""


@dataclass(frozen=True, slots=True)
class GroupAssembler:
    """Hold back pieces of groups until every repetition of their prompt has come.

    >>> GroupAssembler(8, deadline_s=60, stragglers="shrink").max_groups
    1024

    Args:
        group_size: repetitions of a whole group, numbered from 0.
        deadline_s: seconds from the first piece of a group on; none with `wait`. Time in which this stage waits for
            credit does not count, for nothing can arrive then.
        stragglers: what becomes of a group that misses some when its time is over. `drop` ends what has come, `shrink`
            sends it on as it is, `wait` gives it all the time there is: until the stream ends, or is flushed.
        max_groups: groups that may wait; the one that has waited longest makes way, and is treated as if it were due.
        max_bytes: bytes that their columns may take, likewise.

    Raises:
        ValueError: a number that makes no sense, or a deadline with `wait` or none without.
    """

    group_size: int
    deadline_s: float | None = None
    stragglers: Stragglers = "drop"
    max_groups: int = 1024
    max_bytes: int = 2**30

    def __post_init__(self) -> None:
        normalize_counts(self, "group_size", "max_groups", "max_bytes")
        normalize_numbers(self, "deadline_s")
        if self.stragglers not in get_args(Stragglers):
            raise ValueError(f"stragglers: expected one of {', '.join(get_args(Stragglers))}, got {self.stragglers!r}")
        if self.stragglers == "wait" and self.deadline_s is not None:
            raise ValueError(f"deadline_s: expected none with stragglers='wait', got {self.deadline_s}")
        if self.stragglers != "wait" and self.deadline_s is None:
            raise ValueError(
                f"deadline_s: expected seconds with stragglers={self.stragglers!r}, got {self.deadline_s}; to wait for "
                f"as long as there is room, say stragglers='wait'"
            )

    def stage_info(self) -> StageInfo:
        """State that pieces which come to different processes never meet."""
        return StageInfo(sees_everything=True)

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        """See `Stage`. A group that comes whole passes as it is, one that came in pieces is a copy."""
        assembling, pieces, held_up_s = _Assembling(self), receive_chunks(inbox), 0.0
        while True:
            due_s = assembling.due_s
            arrived = await _arrived(pieces, due_s + held_up_s, assembling.waits_without_end)
            if arrived is None:
                break
            if not arrived and math.isinf(due_s):
                await send_all(outbox, assembling.finish())
                continue
            sending_s = anyio.current_time()
            now_s = sending_s - held_up_s
            if not arrived:
                now_s = max(now_s, due_s)  # a timer may be early by a hair
            leaving = assembling.take(arrived, now_s)
            del arrived  # what waits was copied, and the next may be long in coming
            await send_all(outbox, leaving)
            held_up_s += anyio.current_time() - sending_s
        await send_all(outbox, assembling.finish())


async def _arrived(
    pieces: AsyncIterator[list[TrajectoryGroup]], due_s: float, waits_without_end: Callable[[], bool]
) -> list[TrajectoryGroup] | None:
    """The next pieces, none of them where it is `due_s` or a flush is due before; None at the end of the stream."""
    with anyio.CancelScope(deadline=due_s) as scope, flush_cancels(scope, waits_without_end):
        return await anext(pieces, None)
    return []


class _Assembling:
    """What waits, and what becomes of what leaves. Decides; awaits nothing."""

    def __init__(self, rules: GroupAssembler) -> None:
        self._assembly = GroupBuffer(
            rules.group_size,
            deadline_s=rules.deadline_s,
            max_groups=rules.max_groups,
            max_bytes=rules.max_bytes,
            max_closed=CLOSED_PER_PLACE * rules.max_groups,
        )
        self._shrinks = rules.stragglers == "shrink"
        self._context = current()

    @property
    def due_s(self) -> float:
        """When a group is due."""
        return self._assembly.due_s

    def waits_without_end(self) -> bool:
        """Whether groups wait that no deadline ends: a flush does."""
        return bool(self._assembly.groups) and math.isinf(self.due_s)

    def take(self, pieces: Sequence[TrajectoryGroup], now_s: float) -> list[TrajectoryGroup]:
        """The groups that leave now that `pieces` have come, or none have."""
        parted = [parting for piece in pieces for parting in self._assembly.take(piece, now_s)]
        return self._settled(parted + self._assembly.expire(now_s))

    def finish(self) -> list[TrajectoryGroup]:
        """The groups that leave at the end."""
        return self._settled(self._assembly.finish())

    def _settled(self, parted: Sequence[Flush]) -> list[TrajectoryGroup]:
        leaving = [group for parting in parted if (group := self._settle(parting)) is not None]
        self._context.metrics.gauge("assembler/pending_groups", self._assembly.groups)
        self._context.metrics.gauge("assembler/pending_bytes", self._assembly.nbytes)
        return leaving

    def _settle(self, parting: Flush) -> TrajectoryGroup | None:
        """What goes on of `parting`; the ledger is told of the rest."""
        count = 1 if parting.pieces else parting.mask.bit_count()
        self._context.metrics.total(f"assembler/{parting.why.replace(' ', '_')}", count)
        if parting.why == "whole":
            return self._joined(parting)
        if parting.why == "duplicate":
            self._refuse(parting)
        elif not parting.pieces:  # what is late was admitted again, for behind an edge no copy of it is in flight
            drop(trajectories(parting.group, parting.mask), "rejected", REASONS[parting.why])
        elif not self._shrinks:
            drop(trajectories(parting.group, parting.mask), "filtered", REASONS[parting.why])
        else:
            self._context.metrics.total("assembler/truncated_groups")
            return self._joined(parting)
        return None

    def _refuse(self, parting: Flush) -> None:
        """A copy of what waits here. The edges of a pipeline let none through; channels of one's own may."""
        copies = parting.mask.bit_count()
        self._context.ledger.refuse(copies, REASONS["duplicate"])
        self._context.dropped["rejected"] += copies
        self._context.metrics.total("dropped/rejected", copies)

    def _joined(self, parting: Flush) -> TrajectoryGroup | None:
        try:
            return joined(parting.pieces)
        except InvalidRecord as error:
            drop(trajectories(parting.group, parting.mask), "rejected", "its pieces have different columns")
            log.warning(
                "pieces_differ", group=parting.group, repetitions=list(iter_bits(parting.mask)), error=str(error)
            )
            return None


def joined(pieces: Sequence[TrajectoryGroup]) -> TrajectoryGroup:
    """One group of its pieces, that with the lowest repetition first. Where their `meta` differ, that one's counts.

    Raises:
        InvalidRecord: they have different columns.
    """
    if len(pieces) == 1:
        return pieces[0]
    ordered = sorted(pieces, key=lambda piece: int(piece.repetition_ids.min()))
    columns = TrainBatch.pack(ordered).columns()
    columns["offsets"] = columns.pop("cu_seqlens")
    meta = {name: value for piece in reversed(ordered) for name, value in piece.meta.items()}
    return TrajectoryGroup.assemble(msgspec.structs.replace(ordered[0], meta=meta).header(), columns)
