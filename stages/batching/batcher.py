"""Batcher: groups to train batches, packed end to end, whole groups only.

A group is copied as it arrives, so the slot that it came from is free again at once. A batch ships:

1. With `sequences`: as soon as the batch holds that many rollouts.
   Without: as soon as a group of the mean size of those in the batch would no longer fit, so that a batch does not
   wait for a group that has no room in it.
2. In any case when a group arrives that does not fit; that group starts the next batch.
3. At the end of the stream, or when a flush is due (see `pipeline.flush`), with the groups that it has.

Staleness is exact. Lag is counted at the optimizer step that will train the batch: every batch that was shipped before
and is still in flight takes one step first. So no group exceeds the bound while it waits in the channel behind this
stage.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..._pipeline.accounting.end_values import values_of
from ..._pipeline.accounting.ledger import Ledger
from ..._pipeline.channels.channel import ReceiveChannel, SendChannel
from ..._pipeline.errors import RecordTooLarge
from ..._pipeline.graph.context import current, drop
from ..._pipeline.graph.flush import FlushableInbox
from ..._pipeline.graph.stage_info import StageInfo
from ..._schemas import Packer, TrainBatch, TrajectoryGroup, TrajectoryId
from ..._schemas.batch import oldest_versions
from ..._schemas.numbers import normalize_counts
from ..advantages.formulas import Groups
from ..advantages.zero_advantages import zero_advantages
from ..contracts.group_stack import GroupStack

NOTHING_TO_TRAIN = "nothing to train"
"""Reason for dropping a group without a token that trains."""


@dataclass(frozen=True, slots=True)
class Batcher:
    """Pack groups into batches of at most `max_tokens` tokens. Sequences that their sender marked do not train.

    >>> Batcher(max_tokens=16_384).stage_info().takes_at_most_tokens
    16384

    Args:
        max_tokens: maximum number of tokens of a batch, prompts included.
        drop_zero_variance: drop groups whose advantages are all 0, or that have none and two or more rewards, all
            equal. A group with a teacher's candidates is kept, whatever its rewards.
        sequences: rollouts after which a batch ships. As groups stay whole, the last one may bring it beyond.

    Raises:
        InvalidConfig: a number that is not whole, or too small.
    """

    max_tokens: int
    drop_zero_variance: bool = False
    sequences: int | None = None

    def __post_init__(self) -> None:
        normalize_counts(self, "max_tokens", "sequences")

    def stage_info(self) -> StageInfo:
        """State the largest group that fits, and the trajectories that a batch waits for."""
        return StageInfo(
            takes_at_most_tokens=self.max_tokens,
            waits_for=self.sequences,
            fills_columns=(),
            follows_trajectories=True,  # it counts the batches that wait to be trained
        )

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrainBatch]) -> None:
        """Run the stage; see `Stage`.

        Raises:
            RecordTooLarge: a group holds more tokens than a batch may.
            InvalidRecord: groups have different columns.
        """
        context = current()
        filling = _Filling(self, context.ledger, context.schedule.max_lag)
        async for group in FlushableInbox(inbox, filling.holds_any):
            flushed, displaced = (True, None) if group is None else (False, filling.take(group))
            del group  # copied or dropped: its slot must not wait for the next one
            if displaced is not None:
                await outbox.send(displaced)
            if (filling.full or flushed) and (batch := filling.ship()) is not None:
                await outbox.send(batch)
        if (rest := filling.ship()) is not None:
            await outbox.send(rest)


class _Filling:
    """The batch that is being filled, and those that were shipped and not trained yet. Decides; does no I/O."""

    __slots__ = ("_ledger", "_masked", "_max_lag", "_packer", "_rules", "_shipped")

    def __init__(self, rules: Batcher, ledger: Ledger, max_lag: int | None) -> None:
        self._rules = rules
        self._ledger = ledger
        self._max_lag = max_lag
        self._packer = Packer(rules.max_tokens)
        self._masked = 0
        """Rollouts of groups without a token that trains, received while this batch was filled."""
        self._shipped: deque[TrajectoryId] = deque()
        """One trajectory of each shipped batch that may still be waiting or training, oldest first."""

    def holds_any(self) -> bool:
        """Return whether the batch holds any group."""
        return bool(self._packer.groups)

    @property
    def full(self) -> bool:
        """Return whether the batch should ship without waiting for another group."""
        packer = self._packer
        if self._rules.sequences is not None:
            return packer.rollouts >= self._rules.sequences
        return packer.tokens * (packer.groups + 1) > self._rules.max_tokens * packer.groups

    def take(self, group: TrajectoryGroup) -> TrainBatch | None:
        """Copy `group` in, or drop it; return the batch that it did not fit into, if any."""
        if len(group.tokens) > self._rules.max_tokens:
            raise RecordTooLarge(
                f"{group.env}/{group.instance_id}: expected a group of at most {self._rules.max_tokens} tokens "
                f"(max_tokens of this Batcher), got {len(group)} sequences of {len(group.tokens)} tokens in all: "
                f"raise max_tokens, or sample smaller groups or shorter completions"
            )
        group = zero_advantages(group)
        if reason := self._drop_reason(group):
            self._masked += group.rollouts if reason == NOTHING_TO_TRAIN else 0
            drop(group, "filtered", reason)
            return None
        displaced = None if self._packer.fits(group) else self.ship()
        if self._stale(group.policy_versions, group.offsets) is not None:
            drop(group, "stale", self._too_old)
        else:
            self._packer.add(group)
        return displaced

    def ship(self) -> TrainBatch | None:
        """Return the batch as it is sent, without sequences that became stale meanwhile; None if all did."""
        if not self._packer.groups:
            return None
        batch = self._fresh(self._packer.pack())
        if batch is not None and self._max_lag == 0:
            batch = batch.in_order()  # workers finish in any order, and rounding must not depend on it
        if batch is not None:
            batch = msgspec.structs.replace(batch, total_rollouts=batch.total_rollouts + self._masked)
            self._masked = 0
            self._shipped.append(TrajectoryId(*batch.groups[0].id, int(batch.rollout_ids[0])))
            self._observe(batch)
        return batch

    def _drop_reason(self, group: TrajectoryGroup) -> str:
        """Return the reason to drop the group; empty if it trains."""
        mask = group.loss_mask
        ends_in_training = len(mask) and mask[-1]  # almost always true, and cheap
        if not ends_in_training and not mask.any():
            return NOTHING_TO_TRAIN
        if not self._rules.drop_zero_variance:
            return ""
        if group.teacher_ids is not None and (group.teacher_ids[group.loss_mask] >= 0).any():
            return ""
        if group.advantages is not None:
            return "" if group.advantages[group.loss_mask].any() else "zero advantages"
        stack = GroupStack([group])
        compared = Groups(stack.rewards(), stack.live(), stack.sizes, stack.noise())
        return "" if compared.counts[0] == 1 or compared.deviations[0] else "zero variance"

    def _fresh(self, batch: TrainBatch) -> TrainBatch | None:
        """Return the batch without stale groups; there are some if the trainer took more steps than batches shipped."""
        stale = self._stale(batch.policy_versions, batch.cu_seqlens)
        if stale is None:
            return batch
        owners = batch.group_of_sequence()
        keep = np.bincount(owners, stale, len(batch.groups)) == 0
        dropped = ~keep[owners]
        drop(
            (id_ for id_, is_dropped in zip(batch.ids, dropped.tolist(), strict=True) if is_dropped),
            "stale",
            self._too_old,
        )
        current().metrics.ended(values_of("dropped", batch.select(~keep), self._ledger.step))
        return batch.select(keep) if keep.any() else None

    def _stale(self, versions: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Return [S] true on sequences that would be older than the bound when trained; None if there are none."""
        if self._max_lag is None:
            return None
        oldest_allowed = self._training_version() - self._max_lag
        if versions.min(initial=oldest_allowed) == oldest_allowed:  # almost always true, and cheap
            return None
        stale: NDArray[np.bool_] = (oldest_versions(versions, offsets) < oldest_allowed) & (np.diff(offsets) > 0)
        return stale if stale.any() else None

    def _training_version(self) -> int:
        """Return the version of the weights that the next batch to ship will train."""
        while self._shipped and not self._ledger.trajectories.is_open(self._shipped[0]):
            self._shipped.popleft()
        return self._ledger.step + len(self._shipped)

    @property
    def _too_old(self) -> str:
        return f"lag over {self._max_lag}"

    def _observe(self, batch: TrainBatch) -> None:
        metrics, tokens, longest = current().metrics, len(batch.tokens), int(batch.lengths().max())
        metrics.mean("batch/packing_efficiency", tokens / self._rules.max_tokens)
        padded = longest * len(batch)
        metrics.mean("batch/padding_efficiency", tokens / padded, weight=padded)
