"""Which habits of the original server are kept: each of them does harm, and none is kept unless it is asked for."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Habits"]


@dataclass(frozen=True, slots=True)
class Habits:
    """What the gateway does as the original did; by default, nothing of it."""

    newest_first: bool = False
    """Form every batch there is at once, count all of them as steps at once, and hand out the newest first.

    Otherwise a batch is formed, of the oldest groups, when one is asked for, and is a step then.
    """
    arrival_order: bool = False
    """Fill batches in order of arrival: whoever submits faster has more of them.

    Otherwise the environments have their parts by weight, and the groups of each come in order of arrival.
    """
    whole_packs: bool = False
    """Pack only groups whose size divides the largest that waits, and beside minima only those of known environments.

    Otherwise, where that makes no batch, any groups make one whose sizes sum to `batch_size`.
    """
    waits_for_the_silent: bool = False
    """An environment counts until it disconnects, and none does: one that died holds back all others by its minimum.

    Otherwise one that is not heard of does not count, until it is heard of again.
    """
    keeps_the_unpackable: bool = False
    """Admit environments and groups of sizes that can never be packed: they stay where they are.

    Otherwise a group that is larger than its environment said is queued like any other, as are those that wait for
    others of one that is gone; and what is larger than a batch, or adds up to nothing, is refused.
    """
    first_trainer_only: bool = False
    """Ignore a trainer that registers when one has registered already.

    Otherwise what the newer one says holds: it is the one that runs.
    """

    @classmethod
    def original(cls) -> Habits:
        """All of them."""
        return cls(
            newest_first=True,
            arrival_order=True,
            whole_packs=True,
            waits_for_the_silent=True,
            keeps_the_unpackable=True,
            first_trainer_only=True,
        )
