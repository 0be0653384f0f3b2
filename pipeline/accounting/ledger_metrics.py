"""The counts of the ledger as metrics of each step, so that they can be followed over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from .balance import Balance
from .end_states import OTHER_REASONS
from .ledger import Ledger
from .telemetry import Metrics

BEGUN, IN_FLIGHT = "ledger/begun", "ledger/in_flight"

BY_REASON = "ended"
"""The beginning of the names of counts by state and reason."""

MOST_REASONS = 8
"""Reasons of an end state that have metrics of their own."""

LONGEST_REASON = 80
"""Characters of a reason in the name of a metric."""


@contextmanager
def report_ledger(metrics: Metrics, ledger: Ledger) -> Iterator[None]:
    """Report the trajectories that began and ended since the step before, and those in flight, within the body.

    They are `ledger/begun`, `ledger/<end state>` for every state, so that a continued run has the same metrics as one
    without interruption, and the gauge `ledger/in_flight`; and `ended/<end state>/<reason>` in the steps in which some
    ended for that reason, for the first reasons of each state.
    """
    names, before = _Names(), ledger.balance()
    reported, by_reason = _counts(before), names.counts(before)

    def observe() -> None:
        nonlocal reported, by_reason
        balance = ledger.balance()
        now, now_by_reason = _counts(balance), names.counts(balance)
        for name, count in now.items():
            metrics.total(name, count - reported[name])
        for name, count in (now_by_reason - by_reason).items():
            metrics.total(name, count)
        metrics.gauge(IN_FLIGHT, ledger.in_flight)
        reported, by_reason = now, now_by_reason

    with metrics.observing(observe):
        yield


def _counts(balance: Balance) -> dict[str, int]:
    return {BEGUN: balance.admitted, **{f"ledger/{state}": count for state, count in balance.ended.items()}}


def metric_of_reason(state: str, reason: str) -> str:
    """Return the name of the metric of a reason, if it has one of its own.

    >>> metric_of_reason("filtered", "zero  variance")
    'ended/filtered/zero variance'
    """
    return f"{BY_REASON}/{state}/{' '.join(reason.split())[:LONGEST_REASON].rstrip() or OTHER_REASONS}"


class _Names:
    """The metrics of reasons: those that come first keep names of their own."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], str] = {}

    def counts(self, balance: Balance) -> Counter[str]:
        """Return the trajectories that have ended for each reason, by the name of its metric."""
        counts = Counter[str]()
        for state, reasons in balance.reasons.items():
            for reason, count in reasons.items():
                if reason:
                    counts[self._name(state, reason)] += count
        return counts

    def _name(self, state: str, reason: str) -> str:
        name = self._names.get((state, reason))
        if name is None:
            kept = {each for (of, _), each in self._names.items() if of == state}
            name = metric_of_reason(state, reason)
            if name not in kept and len(kept) >= MOST_REASONS:
                name = metric_of_reason(state, OTHER_REASONS)
            self._names[state, reason] = name
        return name
