"""All rules, the gravest first, and the findings in a run."""

from __future__ import annotations

from .finding import Rule, RunFinding
from .flow_rules import MOST_DROPPED_RULE, NOTHING_TRAINED, TOO_OLD, TRAINED_DIFFER
from .length_rules import AT_BOUND, NEVER_END
from .reward_rules import EVALUATION_FALLS, NO_SIGNAL, TOO_EASY, TOO_HARD
from .seen_run import SeenRun
from .update_rules import ENTROPY_GONE, KL_EXPLODING, LEARNING_RATE_ZERO, LOST_IN_ROUNDING, RATIO_COLLAPSED

RULES: tuple[Rule, ...] = (
    NOTHING_TRAINED,
    LEARNING_RATE_ZERO,
    LOST_IN_ROUNDING,
    NO_SIGNAL,
    TOO_OLD,
    KL_EXPLODING,
    RATIO_COLLAPSED,
    ENTROPY_GONE,
    NEVER_END,
    AT_BOUND,
    TOO_HARD,
    TOO_EASY,
    MOST_DROPPED_RULE,
    EVALUATION_FALLS,
    TRAINED_DIFFER,
)
"""The gravest first. Of two that one mistake explains, the nearer one to the mistake comes first."""

READ: frozenset[str] = frozenset(name for rule in RULES for name in (*rule.reads, *rule.also_reads)) - {"eval/"}
"""Metrics that some rule reads, but those of evaluations."""


def findings_in(run: SeenRun) -> list[RunFinding]:
    """Return all findings in a run, the gravest first."""
    return [finding for rule in RULES if (finding := rule.found_in(run)) is not None]


def rule_named(name: str) -> Rule:
    """Return the rule of a finding."""
    return next(rule for rule in RULES if rule.name == name)


def looked_at(run: SeenRun) -> list[str]:
    """Return the names of the rules whose metrics the run has."""
    return [rule.name for rule in RULES if run.courses.emitted(rule.reads)]
