"""GroupAssembler: pieces of groups to whole groups, by id, in any order, duplicates included.

An advantage compares the completions of one prompt, so they must be together before it is computed; completions that
were sampled apart arrive apart. `sampling.group_buffer` assigns pieces to groups and decides when a group is flushed;
this stage waits, joins the pieces of flushed groups, and applies the rule for stragglers.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import anyio
import msgspec

from ..._pipeline.accounting.repetition_sets import iter_bits, trajectories
from ..._pipeline.accounting.telemetry import get_logger
from ..._pipeline.channels.channel import ReceiveChannel, SendChannel
from ..._pipeline.channels.chunks import receive_chunks, send_all
from ..._pipeline.errors import InvalidConfig
from ..._pipeline.graph.context import current, drop
from ..._pipeline.graph.flush import flush_cancels
from ..._pipeline.graph.stage_info import StageInfo
from ..._schemas import InvalidRecord, TrainBatch, TrajectoryGroup
from ..._schemas.choices import check_choice
from ..._schemas.numbers import normalize_counts, normalize_numbers
from .group_buffer import Flush, GroupBuffer, Why

log = get_logger("penstock.group_assembler")

Stragglers: TypeAlias = Literal["drop", "shrink", "wait"]

CLOSED_PER_GROUP = 16
"""Ids of flushed groups that are kept, for each group that may wait; one takes some 250 bytes. A piece that arrives
after so many other groups were flushed is not recognised as late."""

REASONS: dict[Why, str] = {
    "overdue": "incomplete at its deadline",
    "evicted": "incomplete when others needed its room",
    "left over": "incomplete at the end of the stream",
    "late": "came after its group had left",
    "beyond": "a repetition beyond the size of its group",
    "duplicate": "duplicate",
}
"""The reasons that the ledger records."""


@dataclass(frozen=True, slots=True)
class GroupAssembler:
    """Hold pieces of groups until every repetition of their prompt has arrived.

    >>> GroupAssembler(8, deadline_s=60, stragglers="shrink").max_groups
    1024

    Args:
        group_size: repetitions of a whole group, numbered from 0.
        deadline_s: seconds from the first piece of a group on; none with `wait`. Time spent waiting for credit does not
            count, because no piece can arrive then.
        stragglers: rule for a group that is incomplete at its deadline. `drop` ends its repetitions, `shrink` sends it
            as it is, `wait` waits until the stream ends or is flushed.
        max_groups: groups that may wait; beyond that, the one that has waited longest is treated as due.
        max_bytes: bytes of their columns, likewise.

    Raises:
        InvalidConfig: a number out of range, a deadline with `wait`, or no deadline without it.
    """

    group_size: int
    deadline_s: float | None = None
    stragglers: Stragglers = "drop"
    max_groups: int = 1024
    max_bytes: int = 2**30

    def __post_init__(self) -> None:
        normalize_counts(self, "group_size", "max_groups", "max_bytes")
        normalize_numbers(self, "deadline_s")
        check_choice("stragglers", self.stragglers, Stragglers)
        if self.stragglers == "wait" and self.deadline_s is not None:
            raise InvalidConfig(f"deadline_s: expected none with stragglers='wait', got {self.deadline_s}")
        if self.stragglers != "wait" and self.deadline_s is None:
            raise InvalidConfig(
                f"deadline_s: expected seconds with stragglers={self.stragglers!r}, got {self.deadline_s}; to wait "
                f"without a deadline, set stragglers='wait'"
            )

    def stage_info(self) -> StageInfo:
        """State that all pieces must arrive in one process."""
        return StageInfo(sees_everything=True, fills_columns=())

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        """Run the stage; see `Stage`. A group that arrives whole passes as it is, a joined one is a copy."""
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
                now_s = max(now_s, due_s)  # a timer may fire slightly early
            leaving = assembling.take(arrived, now_s)
            del arrived  # pieces that wait were copied; the slots of the others must not wait for the next
            await send_all(outbox, leaving)
            held_up_s += anyio.current_time() - sending_s
        await send_all(outbox, assembling.finish())


async def _arrived(
    pieces: AsyncIterator[list[TrajectoryGroup]], due_s: float, waits_without_end: Callable[[], bool]
) -> list[TrajectoryGroup] | None:
    """Return the next pieces, [] if `due_s` or a flush comes first; None at the end of the stream."""
    with anyio.CancelScope(deadline=due_s) as scope, flush_cancels(scope, waits_without_end):
        return await anext(pieces, None)
    return []


class _Assembling:
    """The groups that wait, and the outcome of those that are flushed. Decides; does no I/O."""

    def __init__(self, rules: GroupAssembler) -> None:
        self._buffer = GroupBuffer(
            rules.group_size,
            deadline_s=rules.deadline_s,
            max_groups=rules.max_groups,
            max_bytes=rules.max_bytes,
            max_closed=CLOSED_PER_GROUP * rules.max_groups,
        )
        self._shrinks = rules.stragglers == "shrink"
        self._context = current()

    @property
    def due_s(self) -> float:
        """Return the time when the next group is due."""
        return self._buffer.due_s

    def waits_without_end(self) -> bool:
        """Return whether groups wait without a deadline, so that only a flush ends their wait."""
        return bool(self._buffer.groups) and math.isinf(self.due_s)

    def take(self, pieces: Sequence[TrajectoryGroup], now_s: float) -> list[TrajectoryGroup]:
        """Take in `pieces`, if any, and return the groups that are ready."""
        flushes = [flush for piece in pieces for flush in self._buffer.take(piece, now_s)]
        return self._handle_all(flushes + self._buffer.expire(now_s))

    def finish(self) -> list[TrajectoryGroup]:
        """Return the groups that are left at the end of the stream."""
        return self._handle_all(self._buffer.finish())

    def _handle_all(self, flushes: Sequence[Flush]) -> list[TrajectoryGroup]:
        leaving = [group for flush in flushes if (group := self._handle(flush)) is not None]
        self._context.metrics.gauge("assembler/pending_groups", self._buffer.groups)
        self._context.metrics.gauge("assembler/pending_bytes", self._buffer.nbytes)
        return leaving

    def _handle(self, flush: Flush) -> TrajectoryGroup | None:
        """Return the group to send on, if any; report the other repetitions to the ledger."""
        count = 1 if flush.pieces else flush.mask.bit_count()
        self._context.metrics.total(f"assembler/{flush.why.replace(' ', '_')}", count)
        if flush.why == "whole":
            return self._joined(flush)
        if flush.why == "duplicate":
            self._reject_duplicate(flush)
        elif not flush.pieces:  # a late piece was admitted again, because no copy of it is in flight behind an edge
            drop(trajectories(flush.group, flush.mask), "rejected", REASONS[flush.why])
        elif not self._shrinks:
            drop(trajectories(flush.group, flush.mask), "filtered", REASONS[flush.why])
        else:
            self._context.metrics.total("assembler/truncated_groups")
            return self._joined(flush)
        return None

    def _reject_duplicate(self, flush: Flush) -> None:
        """Count copies of a piece that waits. The edges of a pipeline stop them; other channels may not."""
        copies = flush.mask.bit_count()
        self._context.ledger.refuse(copies, REASONS["duplicate"])
        self._context.dropped["rejected"] += copies
        self._context.metrics.total("dropped/rejected", copies)

    def _joined(self, flush: Flush) -> TrajectoryGroup | None:
        try:
            return joined(flush.pieces)
        except InvalidRecord as error:
            drop(trajectories(flush.group, flush.mask), "rejected", "its pieces have different columns")
            log.warning("pieces_differ", group=flush.group, repetitions=list(iter_bits(flush.mask)), error=str(error))
            return None


def joined(pieces: Sequence[TrajectoryGroup]) -> TrajectoryGroup:
    """Join the pieces of a group, the one with the lowest repetition first; where `meta` differs, its value counts.

    Raises:
        InvalidRecord: they have different columns.
    """
    if len(pieces) == 1:
        return pieces[0]
    ordered = sorted(pieces, key=lambda piece: int(piece.rollout_ids.min()))
    columns = TrainBatch.pack(ordered).columns()
    columns["offsets"] = columns.pop("cu_seqlens")
    meta = {name: value for piece in reversed(ordered) for name, value in piece.meta.items()}
    return TrajectoryGroup.assemble(msgspec.structs.replace(ordered[0], meta=meta).header(), columns)
