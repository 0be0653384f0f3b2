"""The counts of the ledger as metrics of each step, so that they can be followed over time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .balance import Balance
from .ledger import Ledger
from .telemetry import Metrics

BEGUN, IN_FLIGHT = "ledger/begun", "ledger/in_flight"


@contextmanager
def report_ledger(metrics: Metrics, ledger: Ledger) -> Iterator[None]:
    """Report the trajectories that began and ended since the step before, and those in flight, within the body.

    They are `ledger/begun`, `ledger/<end state>` for every state, so that a continued run has the same metrics as one
    without interruption, and the gauge `ledger/in_flight`.
    """
    reported = _counts(ledger.balance())

    def observe() -> None:
        nonlocal reported
        now = _counts(ledger.balance())
        for name, count in now.items():
            metrics.total(name, count - reported[name])
        metrics.gauge(IN_FLIGHT, ledger.in_flight)
        reported = now

    with metrics.observing(observe):
        yield


def _counts(balance: Balance) -> dict[str, int]:
    return {BEGUN: balance.admitted, **{f"ledger/{state}": count for state, count in balance.ended.items()}}
