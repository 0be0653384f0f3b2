"""Batcher: groups to train batches, packed end to end, whole groups only.

A group is copied as it arrives, so the slot that it came from is free again at once. What ships and when:

1. With `sequences`: as soon as the batch holds that many trajectories.
   Without: as soon as a group of the mean size of those in the batch would no longer fit, so that a batch never waits
   for a group only to find that there is no room for it.
2. In any case when a group arrives that does not fit; that group begins the next batch.
3. At the end of the stream, or when a flush is due (see `pipeline.flush`): what there is.

Staleness is exact. Lag is counted at the optimizer step that will train the batch: every batch that was shipped before
and is still in flight takes one step first. So no group ages past the bound by waiting in the channel behind us.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from .._pipeline.channels.channel import ReceiveChannel, SendChannel
from .._pipeline.context import current, drop
from .._pipeline.errors import RecordTooLarge
from .._pipeline.flush import FlushableInbox
from .._pipeline.ledger import Ledger
from .._pipeline.stage_info import StageInfo
from .._schemas import Packer, TrainBatch, TrajectoryGroup, TrajectoryId
from .._schemas.batch import oldest_versions
from .._schemas.numbers import normalize_counts
from .advantages.formulas import Groups
from .advantages.zero_advantages import zero_advantages
from .group_stack import GroupStack

__all__ = ["Batcher"]

NOTHING_TO_TRAIN = "nothing to train"
"""Why a group without a token that trains is dropped."""


@dataclass(frozen=True, slots=True)
class Batcher:
    """Pack groups into batches of at most `max_tokens` tokens. Of sequences that their sender silenced, none trains.

    >>> Batcher(max_tokens=16_384, max_lag=4).stage_info().takes_at_most_tokens
    16384

    Args:
        max_tokens: tokens that a batch holds at most, prompts included.
        max_lag: optimizer steps that may lie between the weights that sampled a trajectory and those that it trains;
            a group with an older one is dropped as stale. None for no bound. With 0, a batch lies in the order of its
            ids, whichever came first.
        drop_zero_variance: drop groups with advantages that are all 0, or without any whose rewards, two or more, are
            all equal. A group with a teacher's candidates is kept: there is something to learn whatever its rewards.
        sequences: trajectories after which a batch ships. As groups stay whole, the last one may bring it beyond.

    Raises:
        InvalidConfig: a number that is not whole, or too small.
    """

    max_tokens: int
    max_lag: int | None = None
    drop_zero_variance: bool = False
    sequences: int | None = None

    def __post_init__(self) -> None:
        normalize_counts(self, "max_tokens", "sequences")
        normalize_counts(self, "max_lag", least=0)

    def stage_info(self) -> StageInfo:
        """State the largest group that fits, and the trajectories without which no batch ships."""
        return StageInfo(takes_at_most_tokens=self.max_tokens, waits_for=self.sequences)

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrainBatch]) -> None:
        """See `Stage`.

        Raises:
            RecordTooLarge: a group holds more tokens than a batch ever will.
            InvalidRecord: groups have different columns.
        """
        filling = _Filling(self, current().ledger)
        async for group in FlushableInbox(inbox, filling.holds_any):
            flushed, displaced = (True, None) if group is None else (False, filling.take(group))
            del group  # copied or dropped: its slot must not wait until the next one comes
            if displaced is not None:
                await outbox.send(displaced)
            if (filling.full or flushed) and (batch := filling.ship()) is not None:
                await outbox.send(batch)
        if (rest := filling.ship()) is not None:
            await outbox.send(rest)


class _Filling:
    """The batch that is being filled, and the ones that were shipped and not trained yet. Decides; awaits nothing."""

    __slots__ = ("_ledger", "_masked", "_packer", "_rules", "_shipped")

    def __init__(self, rules: Batcher, ledger: Ledger) -> None:
        self._rules = rules
        self._ledger = ledger
        self._packer = Packer(rules.max_tokens)
        self._masked = 0
        """Sequences of groups in which nothing trains that came while this batch was filled."""
        self._shipped: deque[TrajectoryId] = deque()
        """One trajectory of each shipped batch that may still be waiting or training, oldest first."""

    def holds_any(self) -> bool:
        """Whether there is anything to ship."""
        return bool(self._packer.groups)

    @property
    def full(self) -> bool:
        """Whether there is nothing to wait for."""
        packer = self._packer
        if self._rules.sequences is not None:
            return packer.sequences >= self._rules.sequences
        return packer.tokens * (packer.groups + 1) > self._rules.max_tokens * packer.groups

    def take(self, group: TrajectoryGroup) -> TrainBatch | None:
        """Copy `group` in, or drop it; the batch that had to make way for it, if any."""
        if len(group.tokens) > self._rules.max_tokens:
            raise RecordTooLarge(
                f"{group.env}/{group.instance_id}: expected a group of at most {self._rules.max_tokens} tokens "
                f"(max_tokens of this Batcher), got {len(group)} sequences of {len(group.tokens)} tokens in all: "
                f"raise max_tokens, or sample smaller groups or shorter completions"
            )
        group = zero_advantages(group)
        if reason := self._useless(group):
            self._masked += len(group) if reason == NOTHING_TO_TRAIN else 0
            drop(group, "filtered", reason)
            return None
        displaced = None if self._packer.fits(group) else self.ship()
        if self._stale(group.policy_versions, group.offsets) is not None:
            drop(group, "stale", self._too_old)
        else:
            self._packer.add(group)
        return displaced

    def ship(self) -> TrainBatch | None:
        """The batch as it is sent, less what became stale meanwhile; None if nothing is left."""
        if not self._packer.groups:
            return None
        batch = self._fresh(self._packer.pack())
        if batch is not None and self._rules.max_lag == 0:
            batch = batch.in_order()  # several workers may have sampled it, and rounding must not tell who was first
        if batch is not None:
            batch = msgspec.structs.replace(batch, total_sequences=batch.total_sequences + self._masked)
            self._masked = 0
            self._shipped.append(TrajectoryId(*batch.groups[0].id, int(batch.repetition_ids[0])))
            self._observe(batch)
        return batch

    def _useless(self, group: TrajectoryGroup) -> str:
        """Why nothing can be learned from the group; empty if something can."""
        mask = group.loss_mask
        ends_in_training = len(mask) and mask[-1]  # almost always, and cheap to tell
        if not ends_in_training and not mask.any():
            return NOTHING_TO_TRAIN
        if not self._rules.drop_zero_variance:
            return ""
        if group.teacher_ids is not None and (group.teacher_ids[group.loss_mask] >= 0).any():
            return ""
        if group.advantages is not None:
            return "" if group.advantages[group.loss_mask].any() else "zero advantages"
        alone = GroupStack([group])
        compared = Groups(alone.rewards(), alone.live(), alone.sizes, alone.noise())
        return "" if compared.counts[0] == 1 or compared.deviations[0] else "zero variance"

    def _fresh(self, batch: TrainBatch) -> TrainBatch | None:
        """The batch without its stale groups: where the trainer took more steps than there were batches."""
        stale = self._stale(batch.policy_versions, batch.cu_seqlens)
        if stale is None:
            return batch
        owners = batch.group_of_sequence()
        keep = np.bincount(owners, stale, len(batch.groups)) == 0
        dropped = ~keep[owners]
        drop((id_ for id_, gone in zip(batch.ids, dropped.tolist(), strict=True) if gone), "stale", self._too_old)
        return batch.select(keep) if keep.any() else None

    def _stale(self, versions: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """[S] which sequences would be older than the bound when they are trained; None where none would."""
        if self._rules.max_lag is None:
            return None
        oldest_allowed = self._training_version() - self._rules.max_lag
        if versions.min(initial=oldest_allowed) == oldest_allowed:  # almost always, and cheap to tell
            return None
        stale: NDArray[np.bool_] = (oldest_versions(versions, offsets) < oldest_allowed) & (np.diff(offsets) > 0)
        return stale if stale.any() else None

    def _training_version(self) -> int:
        """The version of the weights that the next batch to ship will train."""
        while self._shipped and not self._ledger.is_open(self._shipped[0]):
            self._shipped.popleft()
        return self._ledger.step + len(self._shipped)

    @property
    def _too_old(self) -> str:
        return f"lag over {self._rules.max_lag}"

    def _observe(self, batch: TrainBatch) -> None:
        metrics, tokens, longest = current().metrics, len(batch.tokens), int(batch.lengths().max())
        metrics.mean("batch/packing_efficiency", tokens / self._rules.max_tokens)
        padded = longest * len(batch)
        metrics.mean("batch/padding_efficiency", tokens / padded, weight=padded)
