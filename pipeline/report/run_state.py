"""The state of a run, from the files that it replaces while it runs: `view.json` and `summary.json`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..accounting.balance import Balance
from ..accounting.ledger_metrics import metric_of_reason
from ..errors import FileDamaged, NoView
from ..view.published import Seen, seen


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment."""

    sentence: str
    """Its progress or its end: `runs`, `ended: …`, `died: …`."""
    running: bool = False
    max_steps: int | None = None
    stages: list[str] = []
    """The names of its stages, in the order of the flow."""
    balance: Balance | None = None
    """The counts of its ledger, of the last part of the run; None without a view."""
    metrics: dict[str, dict[str, str]] = {}
    """The metric of each reason of the balance, by state and reason."""


def state_of(folder: Path) -> RunState:
    """Return the state of the run in `folder`. Blocks."""
    try:
        found = seen(folder)
    except FileDamaged as error:
        return RunState(sentence=f"unknown: {error}")
    except NoView:
        return RunState(sentence="unknown: it has no view.json")
    return _state(found)


def _state(found: Seen) -> RunState:
    if found.published is None:
        return RunState(sentence=found.state(), running=found.running)
    shown = found.published.shown
    return RunState(
        sentence=found.state(),
        running=found.running,
        max_steps=shown.progress.max_steps,
        stages=[stage.name for stage in shown.statistics.stages],
        balance=shown.balance,
        metrics={
            state: {reason: metric_of_reason(state, reason) for reason in reasons}
            for state, reasons in shown.balance.reasons.items()
        },
    )
