"""Run the state machines of this folder: the same steps every time, and few of them.

A machine is what Hypothesis calls a rule-based state machine: it takes random steps with a real object and with a naive
picture of it, and compares the two. A rule that breaks raises `Broken`, under the rule's name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TypeAlias, TypeVar
from unittest.mock import patch

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture.providers import HypothesisProvider
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

__all__ = ["PICKS", "Machine", "any_of", "is_broken", "run"]

PICKS = st.integers(0, 10**6)
"""A choice among the things that exist when the step is taken; see `any_of`."""

T = TypeVar("T")

Machine: TypeAlias = type[RuleBasedStateMachine]


def any_of(things: Iterable[T], pick: int) -> T:
    """Return one of `things`."""
    listed = list(things)
    return listed[pick % len(listed)]


def is_broken() -> bool:
    """Return whether a rule is broken: a machine is then torn down, and must not report other rules."""
    return sys.exc_info()[1] is not None


def run(machine: Machine, *, runs: int, steps: int, shrinks: bool = True) -> None:
    """Let `machine` take `steps` steps, `runs` times.

    Now and then Hypothesis draws a number that stands in the source of some module, whichever are imported by then: the
    steps would be others after other tests.
    """
    phases = [Phase.generate, Phase.shrink] if shrinks else [Phase.generate]
    with patch.object(HypothesisProvider, "_maybe_draw_constant", lambda *_, **__: None):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=runs,
                stateful_step_count=steps,
                phases=phases,
                derandomize=True,
                database=None,
                deadline=None,
                report_multiple_bugs=False,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
            ),
        )
