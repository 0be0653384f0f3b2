"""Room: how many groups and bytes the gateway may hold, and who may still add to them.

Among several, nobody may hold more than what is free. (Choudhury and Hahne, 1998: dynamic thresholds of shared
buffers, with a factor of 1.) So who submits little finds room however fast others are, and what leaves makes room for
those first who hold least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from .records import QueueFull, Submission, SubmissionTooLarge

__all__ = ["DEFAULT_CAPACITY", "DEFAULT_CAPACITY_BYTES", "Room"]

DEFAULT_CAPACITY = 4_096
DEFAULT_CAPACITY_BYTES = 2**30

SOONEST_S, LATEST_S = 1.0, 30.0
"""Between these, whoever finds no room is told to come again after as long as nothing has left."""


class Room:
    """What is held, and its bounds."""

    def __init__(self, capacity: int | None, capacity_bytes: int | None) -> None:
        self.held = 0
        """Groups."""
        self.held_bytes = 0
        """Their bytes."""
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._by_lane: Counter[int] = Counter()
        self._bytes_by_lane: Counter[int] = Counter()
        self._left_at: float | None = None

    def check(self, now: float, lane: int, submissions: Sequence[Submission[Any]], *, crowd: bool) -> None:
        """Whether all `submissions`, of which some are of this lane, may be held; others want room too in a `crowd`.

        Raises:
            SubmissionTooLarge: they never will.
            QueueFull: not now.
        """
        groups = len(submissions)
        nbytes = sum(submission.nbytes for submission in submissions)
        for what, wanted, held, own, capacity in (
            ("groups", groups, self.held, self._by_lane[lane], self._capacity),
            ("bytes", nbytes, self.held_bytes, self._bytes_by_lane[lane], self._capacity_bytes),
        ):
            if capacity is None:
                continue
            if wanted > capacity:
                raise SubmissionTooLarge(f"expected at most {capacity} {what} at once, got {wanted}: submit fewer")
            free = capacity - held
            if wanted > free or (crowd and own + wanted > free):
                retry_after_s = self._retry_after_s(now)
                raise QueueFull(
                    f"expected room for {wanted} {what}, got {free} of {capacity} free, with {own} of this environment "
                    f"held: submit again in {retry_after_s:.0f} s",
                    retry_after_s,
                )

    def hold(self, lane: int, submission: Submission[Any]) -> None:
        """This one is held from now on."""
        self.held += 1
        self.held_bytes += submission.nbytes
        self._by_lane[lane] += 1
        self._bytes_by_lane[lane] += submission.nbytes

    def free(self, now: float, lane: int, submission: Submission[Any]) -> None:
        """This one is held no longer."""
        self._left_at = now
        self.held -= 1
        self.held_bytes -= submission.nbytes
        self._by_lane[lane] -= 1
        self._bytes_by_lane[lane] -= submission.nbytes

    def _retry_after_s(self, now: float) -> float:
        """What has not moved for long is not likely to move soon."""
        return SOONEST_S if self._left_at is None else min(LATEST_S, max(SOONEST_S, now - self._left_at))
