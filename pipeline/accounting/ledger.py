"""The ledger: every admitted trajectory ends in exactly one state, with a reason, and the sums balance at any moment.

    admitted = in flight + trained + filtered + stale + rejected + failed + lost + unfinished

One ledger a run, in the trainer's process. A trajectory that a worker samples or processes is in flight here meanwhile;
one of a worker whose prompts are not assigned is admitted when it arrives. So a worker that is killed takes no count
with it.

A trajectory may be delivered twice. Only one copy is ever in flight: another one is refused where it enters the ledger,
goes no further, and counts as admitted and rejected. Sans-I/O: knows no socket and no process. One event loop uses it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

from ..._schemas import GroupId, TrainBatch, TrajectoryGroup, TrajectoryId
from ..errors import LedgerImbalance
from ..util.waiting import Waiters
from .balance import Balance, EndCounts
from .committed_prompts import CommittedPrompts
from .constant_steps import ConstantSteps
from .end_states import EndState
from .epoch import UNKNOWN, Epoch
from .pace import Pace
from .repetition_sets import iter_bits, mask_of, masks_by_group, masks_in, set_mask

CheckpointListener: TypeAlias = Callable[[Mapping[GroupId, int]], None]
"""Called with the trajectories that a checkpoint holds as trained: `Ledger.committed` at the time of writing."""

L = TypeVar("L")


class ProgressCounts(NamedTuple):
    """Counts that only grow, all workers included, for `ProgressGuard`."""

    failed: int
    rejected: int
    untrained: int
    """Trajectories that ended otherwise than trained. A copy of a known trajectory counts if more copies came than a
    replay sends, and what the trainer evaluated does not count."""
    succeeded: int
    """Rollouts that succeeded."""
    trained: int


class Ledger:
    """Counts the trajectories of a run from admission to end."""

    def __init__(self, *, admits_on_end: bool = False) -> None:
        self._admits_on_end = admits_on_end
        """True if trajectories that were not admitted may end: stages that run without a pipeline."""
        self._open: dict[GroupId, int] = {}
        """Repetitions in flight of each group, as a bit mask."""
        self._begun: dict[GroupId, int] = {}
        """The repetitions among them that were admitted and have not been handed over yet."""
        self._committed = CommittedPrompts()
        self._admitted = 0
        self._in_flight = 0
        self._ends = EndCounts()
        self._pace = Pace()
        self._room = Waiters()
        self._on_checkpoint: list[CheckpointListener] = []
        self._on_end: list[Callable[[], None]] = []
        """Called after trajectories have ended."""
        self._succeeded = 0
        """Rollouts that succeeded."""
        self.ended_here: int = 0
        """Trajectories that ended in this ledger, in any state."""
        self._copies = 0
        """Copies of trajectories that are in flight here, or were trained."""
        self._restored = 0
        """Prompts that were trained by the run that this one resumes."""
        self._evaluated = 0
        """Ended trajectories that were sampled for an evaluation."""
        self.epoch: Epoch = UNKNOWN
        """Progress of the source in an epoch of its prompts, as last reported to this process."""
        self.constant_steps: ConstantSteps | None = None
        """The steps of this run, all without a gradient from rewards; None once one had some."""
        self._on_step: list[Callable[[int], None]] = []
        """Called after an optimizer step was committed here."""
        self.step: int = 0
        """The last optimizer step that was committed, or that this process was notified of."""
        self.published: int | None = None
        """The newest version of the weights that a sink has published, or that this process was notified of."""
        self.unaccounted: Counter[str] = Counter()
        """Lost trajectories that a stage received, and neither sent nor dropped, by the name of the stage."""
        self.checkpoint: str = ""
        """Path of the last checkpoint that was announced; empty without one."""

    def __repr__(self) -> str:
        balance = self.balance()
        ended = ", ".join(f"{count} {state}" for state, count in balance.ended.items() if count)
        return f"<Ledger: {balance.admitted} admitted, {balance.in_flight} in flight, {ended or 'none ended'}>"

    # -- from admission to end ---------------------------------------------------------------------------------------

    def admit(self, group: GroupId, repetitions: Iterable[int]) -> int:
        """Admit trajectories whose sampling begins. One that is in flight already is not counted again.

        Returns:
            The number of new ones.

        Raises:
            LedgerImbalance: one of them was trained before: ids are never reused within a run.
        """
        mask = mask_of(repetitions)
        if again := self._committed.mask(group) & mask:
            raise LedgerImbalance(
                f"{_name(group, again)} was trained before and is admitted again: expected ids that are never reused"
            )
        new, _ = self._enter(group, mask)
        self._admitted += new.bit_count()
        set_mask(self._begun, group, self._begun.get(group, 0) | new)
        return new.bit_count()

    def hand_over(self, record: TrajectoryGroup | TrainBatch) -> int:
        """Hand over `record` of a source, about to be sent, or arrived; admit trajectories that were not.

        Returns:
            The repetitions that must not be sent, as a bit mask. They are copies: of trajectories that were handed over
            before and are in flight, or were trained.

        Raises:
            LedgerImbalance: a batch holds a copy. A batch cannot be sent in part, so no count changes.
            InvalidRecord: a group has no sequences.
        """
        refused = 0
        self.succeed(len(record))
        for group, mask in self._entering(record, self._begun):
            begun = self._begun.get(group, 0)
            new, copies = self._enter(group, mask, begun)
            self._admitted += (new | copies).bit_count()
            if begun:
                set_mask(self._begun, group, begun & ~mask)
            if copies:
                self._reject_copies(group, copies)
                refused |= copies
        return refused

    def take_back(self, record: TrajectoryGroup | TrainBatch) -> None:
        """Let `record` be handed over again: it was not sent, or leaves a fragment."""
        for group, mask in masks_by_group(record):
            set_mask(self._begun, group, self._begun.get(group, 0) | mask & self._open.get(group, 0))

    def succeed(self, count: int = 1) -> None:
        """Count rollouts that succeeded; this ends a row of failures."""
        self._succeeded += count

    def refuse(self, copies: int, reason: str) -> None:
        """Count copies of trajectories that this ledger has already as admitted and rejected; the first ones go on."""
        self._admitted += copies
        self._reject(copies, reason)

    def end(self, what: TrajectoryGroup | Iterable[TrajectoryId], state: EndState, reason: str = "") -> None:
        """Count the end of trajectories.

        Raises:
            LedgerImbalance: one of them is not in flight: it was never admitted, or ended before. No count changes.
        """
        leaving = masks_by_group(what)
        for group, mask in leaving:
            self._expect_in_flight(group, mask, state)
        self._leave(leaving, state, reason)

    def commit(self, batch: TrainBatch, step: int) -> None:
        """Count the trajectories of `batch` as trained by the completed optimizer step `step`.

        Raises:
            LedgerImbalance: one of them was trained before, or is not in flight. No count changes.
        """
        masks = masks_in(batch.repetition_ids, [packed.sequences for packed in batch.groups])
        self._commit(((packed.id, mask) for packed, mask in zip(batch.groups, masks, strict=True)), step)

    def commit_ids(self, trained: Iterable[TrajectoryId], step: int) -> None:
        """Count trajectories as trained by optimizer step `step` of a trainer that is given no batches; see `commit`.

        Without any, the step is done all the same.
        """
        self._commit(masks_by_group(trained), step)

    def _commit(self, committing: Iterable[tuple[GroupId, int]], step: int) -> None:
        trained: dict[GroupId, int] = {}
        for group, mask in committing:
            earlier = trained.get(group, 0)
            if again := (self._committed.mask(group) | earlier) & mask:
                raise LedgerImbalance(f"{_name(group, again)} was trained before and is committed again")
            self._expect_in_flight(group, mask, "trained")
            trained[group] = earlier | mask
        self.step = max(self.step, step)
        self._leave(trained.items(), "trained", "")
        for group, mask in trained.items():
            self._committed.add(group, mask)
        for call in self._on_step:
            call(step)

    def note_published(self, version: int) -> None:
        """Note that `version` of the weights is published."""
        self.published = version

    def note_step(self, step: int) -> None:
        """Note that optimizer step `step` is done. For a worker: its pipeline commits the steps."""
        if step > self.step:
            self.step = step
            self._room.wake_all()

    def end_unsent(self, group: GroupId, mask: int, state: EndState, reason: str) -> None:
        """Count trajectories that a worker of a source began, and dropped before they were sent; known ones are not."""
        unknown = (mask & ~self.known(group)).bit_count()
        self._admitted += unknown
        self._count(state, reason, unknown)
        self.ends_changed()

    def end_all(self, state: EndState, reason: str) -> int:
        """Count the end of all trajectories in flight, at the end of the run; return their number."""
        left = list(self._open.items())
        self._leave(left, state, reason)
        return sum(mask.bit_count() for _, mask in left)

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Trajectories that are admitted and have not ended."""
        return self._in_flight

    def progress(self) -> ProgressCounts:
        """Return the counts that show whether the run makes progress."""
        trained = self._ends["trained"]
        replayed = min(self._copies, self._admitted - self._copies + self._restored)
        return ProgressCounts(
            failed=self._ends["failed"],
            rejected=self._ends["rejected"],
            untrained=self.ended_here - trained - replayed - self._evaluated,
            succeeded=self._succeeded,
            trained=trained,
        )

    def in_flight_by_group(self) -> dict[GroupId, int]:
        """Return the repetitions in flight in this ledger of each group, as a bit mask. A copy, as of now."""
        return dict(self._open)

    def note_evaluated(self, count: int) -> None:
        """Note that so many trajectories were sampled for an evaluation; they end as others do."""
        self._evaluated += count

    @property
    def trained_per_step(self) -> float | None:
        """Trajectories of this ledger that one optimizer step trains, averaged over the last steps.

        Before the first step the number that `expect_per_step` was given, or None.
        """
        return self._pace.per_step

    def expect_per_step(self, trajectories: float) -> None:
        """Note the number of trajectories of this ledger that an optimizer step trains, before the first one."""
        self._pace.expected = trajectories

    @property
    def committed(self) -> CommittedPrompts:
        """Repetitions of each group that were trained, as a bit mask, for a checkpoint. A copy, as of now."""
        return CommittedPrompts(self._committed)

    def restore(self, committed: Mapping[GroupId, int], step: int) -> None:
        """Continue from a checkpoint: `committed` was trained by the run that this one resumes."""
        self._committed = CommittedPrompts(committed)
        self._restored = len(self._committed)
        self.step = step

    def known(self, group: GroupId) -> int:
        """Return the repetitions of `group` that are in flight in this ledger or were trained, as a bit mask."""
        return self._open.get(group, 0) | self._committed.mask(group)

    def is_open(self, trajectory: TrajectoryId) -> bool:
        """Return whether the trajectory is in flight in this ledger."""
        return bool(self._open.get(trajectory.group, 0) >> trajectory.repetition_id & 1)

    async def room(self, limit: float) -> None:
        """Wait until fewer than `limit` trajectories of this ledger are in flight."""
        while self._in_flight >= limit:
            await self._room.wait()

    async def reached(self, step: int) -> None:
        """Wait until optimizer step `step` is done, as far as this process knows."""
        while self.step < step:
            await self._room.wait()

    async def ended(self, group: GroupId) -> None:
        """Wait until no trajectory of `group` is in flight in this ledger."""
        while group in self._open:
            await self._room.wait()

    def balance(self) -> Balance:
        """Return the counts now."""
        return Balance(self._admitted, self._in_flight, self._ends.by_state(), self._ends.by_reason())

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def announce_checkpoint(self, committed: Mapping[GroupId, int], path: str | Path = "") -> None:
        """Notify the `on_checkpoint` listeners of a checkpoint on the disk, at `path`, that holds `committed`."""
        self.checkpoint = str(path)
        for call in self._on_checkpoint:
            call(committed)

    def on_checkpoint(self, call: CheckpointListener) -> AbstractContextManager[None]:
        """Call `call` within the body for every checkpoint of the run, with the trajectories that it holds."""
        return _listed(self._on_checkpoint, call)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def on_end(self, call: Callable[[], None]) -> AbstractContextManager[None]:
        """Call `call` within the body after trajectories have ended."""
        return _listed(self._on_end, call)

    def on_step(self, call: Callable[[int], None]) -> AbstractContextManager[None]:
        """Call `call` within the body after each optimizer step that is committed to this ledger."""
        return _listed(self._on_step, call)

    def ends_changed(self) -> None:
        """Call the `on_end` listeners: trajectories have ended."""
        for call in self._on_end:
            call()

    # -- counting ----------------------------------------------------------------------------------------------------

    def _entering(
        self, record: TrajectoryGroup | TrainBatch, begun: Mapping[GroupId, int]
    ) -> Collection[tuple[GroupId, int]]:
        """Return the trajectories of `record` by group; refuse a batch with copies, other than `begun` ones."""
        entering = masks_by_group(record)
        if isinstance(record, TrainBatch):
            for group, mask in entering:
                if copies := mask & self.known(group) & ~begun.get(group, 0):
                    raise LedgerImbalance(
                        f"{_name(group, copies)} is in flight or was trained, and arrives again in a batch: expected a "
                        f"batch without copies, because a batch cannot go on in part"
                    )
        return entering

    def _enter(self, group: GroupId, mask: int, begun: int = 0) -> tuple[int, int]:
        """Count these as in flight; return those that were not in flight before, and those that are copies."""
        present = self._open.get(group, 0)
        copies = mask & (present & ~begun | self._committed.mask(group))
        new = mask & ~(present | copies)
        if new:
            self._add(group, new)
        return new, copies

    def _add(self, group: GroupId, new: int) -> None:
        self._open[group] = self._open.get(group, 0) | new
        self._in_flight += new.bit_count()

    def _reject_copies(self, group: GroupId, copies: int) -> None:
        trained = copies & self._committed.mask(group)
        self._reject(trained.bit_count(), "trained already")
        self._reject((copies & ~trained).bit_count(), "in flight already")

    def _reject(self, copies: int, reason: str) -> None:
        if not copies:
            return
        self._copies += copies
        self._count("rejected", reason, copies)
        self.ends_changed()

    def _remove(self, group: GroupId, mask: int) -> None:
        set_mask(self._open, group, self._open[group] & ~mask)
        if group in self._begun:
            set_mask(self._begun, group, self._begun[group] & ~mask)
        self._in_flight -= mask.bit_count()

    def _expect_in_flight(self, group: GroupId, mask: int, state: EndState) -> None:
        absent = mask & ~self._open.get(group, 0)
        if absent and not self._admits_on_end:
            raise LedgerImbalance(
                f"{_name(group, absent)} ended as {state} but is not in flight: "
                f"expected every trajectory to be admitted once and to end once"
            )

    def _leave(self, leaving: Collection[tuple[GroupId, int]], state: EndState, reason: str) -> None:
        """Count the end of these, all in flight, no group twice."""
        if self._admits_on_end:
            self._admit_absent(leaving)
        ended = 0
        for group, mask in leaving:
            self._remove(group, mask)
            ended += mask.bit_count()
        self._count(state, reason, ended)
        if ended and state == "trained":
            self._pace.trained(self.step, ended)
        if self._room:
            self._room.wake_all()
        self.ends_changed()

    def _admit_absent(self, leaving: Collection[tuple[GroupId, int]]) -> None:
        for group, mask in leaving:
            absent = mask & ~self._open.get(group, 0)
            self._add(group, absent)
            self._admitted += absent.bit_count()

    def _count(self, state: EndState, reason: str, count: int) -> None:
        if count:
            self._ends.add(state, reason, count)
            self.ended_here += count


@contextmanager
def _listed(listeners: list[L], listener: L) -> Iterator[None]:
    """Add `listener` to `listeners` within the body."""
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)


def _name(group: GroupId, mask: int) -> str:
    return f"{group.env}/{group.instance_id} repetitions {list(iter_bits(mask))}"
