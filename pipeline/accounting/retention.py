"""Keep files of a journal, records of a sender, or senders, until a checkpoint contains their trajectories.

A trajectory is *saved* when the newest checkpoint contains it, or when it was dropped. One that was trained after that
checkpoint is not saved: a run that resumes from it trains it again. Decides; does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from ..._schemas import GroupId, TrajectoryGroup
from .ledger import Ledger
from .repetition_sets import mask_in

K = TypeVar("K")


class Retention(Generic[K]):
    """Maps each kept item to its trajectories that are not saved; without any, the item is dropped.

    >>> retention = Retention[str]()
    >>> retention.keep("a file", GroupId("env", "7"), 0b11)
    >>> retention.save(GroupId("env", "7"), 0b01)
    [('a file', 1)]
    >>> "a file" in retention
    True
    """

    def __init__(self) -> None:
        self._unsaved: dict[GroupId, dict[K, int]] = {}
        """Repetitions of each group that are not saved, as a bit mask, by the item kept for them."""
        self._groups: dict[K, int] = {}
        """The number of groups that each is kept for, in the order of the first `keep`."""

    def __contains__(self, kept: K) -> bool:
        return kept in self._groups

    def __iter__(self) -> Iterator[K]:
        return iter(list(self._groups))

    def __len__(self) -> int:
        return len(self._groups)

    def keep(self, kept: K, group: GroupId, mask: int) -> None:
        """Keep `kept` until these repetitions are saved."""
        if mask:
            unsaved = self._unsaved.setdefault(group, {})
            if kept not in unsaved:
                self._groups[kept] = self._groups.get(kept, 0) + 1
            unsaved[kept] = unsaved.get(kept, 0) | mask

    def keep_record(self, kept: K, record: TrajectoryGroup) -> None:
        """Keep `kept` until the trajectories of `record` are saved."""
        self.keep(kept, record.id, mask_in(record.rollout_ids))

    def save(self, group: GroupId, mask: int) -> list[tuple[K, int]]:
        """Note that these repetitions are saved; return the items kept for them, each with its own share of these."""
        saved = [(kept, unsaved & mask) for kept, unsaved in self._unsaved.get(group, {}).items() if unsaved & mask]
        for kept, own in saved:
            self._remove(kept, group, own)
        return saved

    def save_checkpoint(self, committed: Mapping[GroupId, int], ledger: Ledger) -> list[tuple[K, GroupId, int]]:
        """Note that a checkpoint contains `committed`; return the results of `save`, for each group.

        Trajectories that `ledger` does not know were dropped.
        """
        return [
            (kept, group, own)
            for group in list(self._unsaved)
            for kept, own in self.save(group, committed.get(group, 0) | ~ledger.trajectories.known(group))
        ]

    def discard(self, kept: K) -> None:
        """Keep `kept` no longer, if it was kept."""
        for group in [group for group, unsaved in self._unsaved.items() if kept in unsaved]:
            self._remove(kept, group, -1)

    def _remove(self, kept: K, group: GroupId, mask: int) -> None:
        unsaved = self._unsaved[group]
        unsaved[kept] &= ~mask
        if unsaved[kept]:
            return
        del unsaved[kept]
        if not unsaved:
            del self._unsaved[group]
        self._groups[kept] -= 1
        if not self._groups[kept]:
            del self._groups[kept]
