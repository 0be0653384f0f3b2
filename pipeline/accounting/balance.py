"""The balance of a ledger, and the counts of ends by state and reason, bounded in number.

Knows no trajectory and no other process.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from ..util.printing import printable
from .end_states import END_STATES, OTHER_REASONS, EndState

MAX_REASONS = 64
"""Distinct reasons for each end state: error messages may all differ, and a run may fail for days."""

MAX_REASON_LENGTH = 200
"""Characters of a reason that are kept."""


class Balance(msgspec.Struct, frozen=True):
    """The counts of a ledger at one moment."""

    admitted: int
    """Trajectories whose sampling has begun."""
    in_flight: int
    """Admitted trajectories that have not ended."""
    ended: dict[str, int]
    """Trajectories that have ended, by state; every state is listed."""
    reasons: dict[str, dict[str, int]]
    """The same, by state and reason."""

    @property
    def balanced(self) -> bool:
        """Return whether admitted = in flight + ended."""
        return self.admitted == self.in_flight + sum(self.ended.values())


class EndCounts:
    """Counts trajectories that have ended, by state and reason."""

    def __init__(self) -> None:
        self._states: Counter[EndState] = Counter()
        self._reasons: Counter[tuple[EndState, str]] = Counter()

    def __getitem__(self, state: EndState) -> int:
        """Return the count of a state."""
        return self._states[state]

    def add(self, state: EndState, reason: str, count: int) -> None:
        """Add `count` ends for a reason."""
        self._states[state] += count
        self._reasons[state, self._kept(state, reason)] += count

    def by_state(self) -> dict[str, int]:
        """Return the counts; every state is listed. A copy, as of now."""
        return {state: self._states[state] for state in END_STATES}

    def by_reason(self) -> dict[str, dict[str, int]]:
        """Return the counts by state and reason. A copy, as of now."""
        reasons: dict[str, dict[str, int]] = {state: {} for state in END_STATES}
        for (state, reason), count in self._reasons.items():
            reasons[state][reason] = count
        return reasons

    def _kept(self, state: EndState, reason: str) -> str:
        """Return `reason` as it is stored: printable, cut where it is long, `OTHER_REASONS` where there are too many.

        Messages of errors may have escapes of a terminal, or lone surrogates, of which no file of JSON can be written.
        """
        reason = printable(reason)
        if len(reason) > MAX_REASON_LENGTH:
            reason = reason[: MAX_REASON_LENGTH - 1] + "…"
        if (state, reason) in self._reasons or sum(kept == state for kept, _ in self._reasons) < MAX_REASONS:
            return reason
        return OTHER_REASONS
