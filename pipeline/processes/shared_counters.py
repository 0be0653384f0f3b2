"""A worker's account: how many trajectories it admitted and ended, in a page that outlives it."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Literal, TypeAlias, get_args

__all__ = ["COUNTERS_BYTES", "END_STATES", "OTHER_REASONS", "UNTOLD", "EndState", "SharedCounters"]

EndState: TypeAlias = Literal["trained", "filtered", "stale", "rejected", "failed", "lost"]
"""How a trajectory can end.

trained: the optimizer step that used it is done · filtered: dropped by choice (zero variance, a length limit) ·
stale: older than the lag bound · rejected: refused as invalid · failed: its environment or reward raised or ran out of
time · lost: the process that held it died or was told to stop.
"""

END_STATES: tuple[EndState, ...] = get_args(EndState)

OTHER_REASONS = "other reasons"
"""Those that are not told apart, for there are too many."""

UNTOLD = "in "
"""Begins the reason, with a worker's name, of what ended in it for a reason that it has not told yet."""

COUNTERS_BYTES = 8 * (2 + len(END_STATES))


class SharedCounters:
    """A worker's counters in a page of shared memory: one writer, the worker; readable after it was killed.

    Words, each a signed 64-bit integer: admitted, succeeded, then one for each end state that the worker itself
    established.
    """

    __slots__ = ("_words", "name", "reasons", "taken_over")

    def __init__(self, page: mmap.mmap | memoryview | bytearray, name: str = "") -> None:
        self._words = memoryview(page)[:COUNTERS_BYTES].cast("q")
        self.name = name
        """Who keeps it, for reasons and messages."""
        self.taken_over = 0
        """Trajectories that the reader's ledger has taken over; kept by the reader."""
        self.reasons: dict[str, dict[str, int]] = {}
        """Why trajectories ended within the worker, by state, as far as it has told; kept by the reader."""

    @property
    def admitted(self) -> int:
        """Trajectories that the worker admitted."""
        return self._words[0]

    @property
    def succeeded(self) -> int:
        """Rollouts that succeeded in the worker."""
        return self._words[1]

    def ended(self, state: EndState) -> int:
        """Trajectories that ended so within the worker."""
        return self._words[2 + END_STATES.index(state)]

    @property
    def in_flight(self) -> int:
        """Trajectories that are still with the worker, or on their way to the reader.

        The ends are read before the admissions, so that a worker that is counting meanwhile never shows too few.
        """
        ended = sum(self.ended(state) for state in END_STATES)
        return self.admitted - ended - self.taken_over

    def ends(self) -> Iterator[tuple[EndState, str, int]]:
        """How many ended within the worker, by state and reason: its own words, or its name where it has told none."""
        for state in END_STATES:
            told = self.reasons.get(state, {})
            untold = self.ended(state) - sum(told.values())
            for reason, count in told.items():
                yield state, reason, count
            if untold:
                yield state, f"{UNTOLD}{self.name}", untold

    def admit(self, count: int) -> None:
        """Count `count` admissions."""
        self._words[0] += count

    def succeed(self, count: int) -> None:
        """Count `count` rollouts that succeeded."""
        self._words[1] += count

    def end(self, state: EndState, count: int) -> None:
        """Count `count` ends."""
        self._words[2 + END_STATES.index(state)] += count

    def close(self) -> None:
        """Let go of the page, so that it can be unmapped."""
        self._words.release()
