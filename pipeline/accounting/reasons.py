"""Reasons of ends as text, for messages."""

from __future__ import annotations

from collections.abc import Mapping

from .end_states import OTHER_REASONS

REASONS_SHOWN = 3
"""Reasons that a message lists, those that came most often."""


def first_reasons(reasons: Mapping[str, int]) -> str:
    """Return the most frequent of `reasons`, each with its count; the rest comes last."""
    most = sorted(reasons.items(), key=lambda item: (item[0] == OTHER_REASONS, -item[1]))
    listed = [f"{count} × {reason}" if reason else str(count) for reason, count in most[:REASONS_SHOWN]]
    more = [f"{len(most) - REASONS_SHOWN} more reasons"] if len(most) > REASONS_SHOWN else []
    return ", ".join(listed + more)


def reasons_by_state(reasons: Mapping[str, Mapping[str, int]]) -> str:
    """Return the counts of ends by state, each with its most frequent reasons."""
    return "; ".join(
        f"{sum(counts.values())} {state} ({first_reasons(counts)})" for state, counts in reasons.items() if counts
    )
