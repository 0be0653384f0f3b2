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
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from ..._schemas import GroupId, TrainBatch, TrajectoryGroup, TrajectoryId
from ..util.listeners import Listeners
from ..util.waiting import Waiters
from .balance import Balance, EndCounts
from .committed_prompts import CommittedPrompts
from .constant_steps import ConstantSteps
from .end_states import EndState
from .epoch import UNKNOWN, Epoch
from .known_trajectories import KnownTrajectories
from .pace import Pace
from .repetition_sets import mask_of, masks_by_group, masks_in


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
        self.trajectories: KnownTrajectories = KnownTrajectories()
        """Those in flight in this ledger, and those that were trained."""
        self._admitted = 0
        self._ends = EndCounts()
        self._room = Waiters()
        self.pace: Pace = Pace()
        """Trajectories of this ledger that one optimizer step trains."""
        self.on_end: Listeners[[]] = Listeners()
        """Called after trajectories have ended."""
        self.on_step: Listeners[[int]] = Listeners()
        """Called after each optimizer step that is committed to this ledger."""
        self.on_checkpoint: Listeners[[Mapping[GroupId, int]]] = Listeners()
        """Called for every checkpoint of the run, with the trajectories that it holds as trained."""
        self._succeeded = 0
        """Rollouts that succeeded."""
        self.ended_here: int = 0
        """Trajectories that ended in this ledger, in any state."""
        self._copies = 0
        """Copies of trajectories that are in flight here, or were trained."""
        self._restored = 0
        """Prompts that were trained by the run that this one resumes."""
        self.evaluated: int = 0
        """Trajectories that were sampled for an evaluation; they end as others do."""
        self.epoch: Epoch = UNKNOWN
        """Progress of the source in an epoch of its prompts, as last reported to this process."""
        self.constant_steps: ConstantSteps | None = None
        """The steps of this run, all without a gradient from rewards; None once one had some."""
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
        new = self.trajectories.begin(group, mask_of(repetitions)).bit_count()
        self._admitted += new
        return new

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
        self.succeed(record.rollouts)
        entering = masks_by_group(record)
        if isinstance(record, TrainBatch):
            self.trajectories.check_batch(entering)
        for group, mask in entering:
            new, copies = self.trajectories.hand_over(group, mask)
            self._admitted += (new | copies).bit_count()
            if copies:
                self._reject_copies(group, copies)
                refused |= copies
        return refused

    def take_back(self, record: TrajectoryGroup | TrainBatch) -> None:
        """Let `record` be handed over again: it was not sent, or leaves a fragment."""
        self.trajectories.take_back(record)

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
        self._leave(masks_by_group(what), state, reason)

    def commit(self, batch: TrainBatch, step: int) -> None:
        """Count the trajectories of `batch` as trained by the completed optimizer step `step`.

        Raises:
            LedgerImbalance: one of them was trained before, or is not in flight. No count changes.
        """
        masks = masks_in(batch.rollout_ids, [packed.sequences for packed in batch.groups])
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
            self.trajectories.check_untrained(group, mask, earlier)
            trained[group] = earlier | mask
        self._leave(trained.items(), "trained", "", step)
        for group, mask in trained.items():
            self.trajectories.committed.add(group, mask)
        self.on_step.notify(step)

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
        unknown = (mask & ~self.trajectories.known(group)).bit_count()
        self._admitted += unknown
        self._count(state, reason, unknown)
        self.on_end.notify()

    def end_all(self, state: EndState, reason: str) -> int:
        """Count the end of all trajectories in flight, at the end of the run; return their number."""
        left = list(self.trajectories.open.items())
        self._leave(left, state, reason)
        return sum(mask.bit_count() for _, mask in left)

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Trajectories that are admitted and have not ended."""
        return self.trajectories.in_flight

    def progress(self) -> ProgressCounts:
        """Return the counts that show whether the run makes progress."""
        trained = self._ends["trained"]
        replayed = min(self._copies, self._admitted - self._copies + self._restored)
        return ProgressCounts(
            failed=self._ends["failed"],
            rejected=self._ends["rejected"],
            untrained=self.ended_here - trained - replayed - self.evaluated,
            succeeded=self._succeeded,
            trained=trained,
        )

    @property
    def committed(self) -> CommittedPrompts:
        """Repetitions of each group that were trained, as a bit mask, for a checkpoint. A copy, as of now."""
        return CommittedPrompts(self.trajectories.committed)

    def restore(self, committed: Mapping[GroupId, int], step: int) -> None:
        """Continue from a checkpoint: `committed` was trained by the run that this one resumes."""
        self.trajectories.committed = CommittedPrompts(committed)
        self._restored = len(self.trajectories.committed)
        self.step = step

    async def room(self, limit: float) -> None:
        """Wait until fewer than `limit` trajectories of this ledger are in flight."""
        while self.in_flight >= limit:
            await self._room.wait()

    async def reached(self, step: int) -> None:
        """Wait until optimizer step `step` is done, as far as this process knows."""
        while self.step < step:
            await self._room.wait()

    async def ended(self, group: GroupId) -> None:
        """Wait until no trajectory of `group` is in flight in this ledger."""
        while group in self.trajectories.open:
            await self._room.wait()

    def balance(self) -> Balance:
        """Return the counts now."""
        return Balance(self._admitted, self.in_flight, self._ends.by_state(), self._ends.by_reason())

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def announce_checkpoint(self, committed: Mapping[GroupId, int], path: str | Path = "") -> None:
        """Notify the `on_checkpoint` listeners of a checkpoint on the disk, at `path`, that holds `committed`."""
        self.checkpoint = str(path)
        self.on_checkpoint.notify(committed)

    # -- counting ----------------------------------------------------------------------------------------------------

    def _reject_copies(self, group: GroupId, copies: int) -> None:
        trained = copies & self.trajectories.committed.mask(group)
        self._reject(trained.bit_count(), "trained already")
        self._reject((copies & ~trained).bit_count(), "in flight already")

    def _reject(self, copies: int, reason: str) -> None:
        if not copies:
            return
        self._copies += copies
        self._count("rejected", reason, copies)
        self.on_end.notify()

    def _leave(self, leaving: Collection[tuple[GroupId, int]], state: EndState, reason: str, step: int = 0) -> None:
        """Count the end of these, no group twice, by optimizer step `step` where it trained them."""
        if self._admits_on_end:
            self._admitted += self.trajectories.add_absent(leaving)
        self.trajectories.check_open(leaving, state)
        self.step = max(self.step, step)
        ended = self.trajectories.remove(leaving)
        self._count(state, reason, ended)
        if ended and state == "trained":
            self.pace.trained(self.step, ended)
        if self._room:
            self._room.wake_all()
        self.on_end.notify()

    def _count(self, state: EndState, reason: str, count: int) -> None:
        if count:
            self._ends.add(state, reason, count)
            self.ended_here += count
