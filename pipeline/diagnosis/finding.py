"""`RunFinding`: the result of a rule; `Rule`: how it is found, and what can be done about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from ..._schemas.bounds import Line, Name
from .seen_run import SeenRun

PAGE = "docs/diagnose.md"
"""The page with a row for each rule."""


class RunFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that keeps a run from learning."""

    rule: Name
    """The name of its rule."""
    numbers: Line
    """The numbers that show it, with their steps."""
    causes: Annotated[tuple[Line, ...], Meta(max_length=16)]
    """The usual causes, the most frequent one first."""
    change: Annotated[tuple[Line, ...], Meta(max_length=16)]
    """Values of the configuration to try, as `key=value`."""

    def __str__(self) -> str:
        """Return it in one line."""
        return f"{self.rule}: {self.numbers}; try {' or '.join(self.change)}"


class Evidence(NamedTuple):
    """The part of a finding that depends on the run."""

    numbers: str
    change: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing to look for."""

    name: str
    look: Callable[[SeenRun], Evidence | None]
    """Returns the evidence; None where there is none."""
    reads: tuple[str, ...]
    """Metrics without which it cannot be seen; `eval/` for those of an evaluation."""
    means: str
    """The meaning of a finding, as a sentence without a full stop."""
    causes: tuple[str, ...]
    keys: tuple[str, ...]
    """Keys of the configuration that it proposes to change."""
    also_reads: tuple[str, ...] = ()
    """Metrics that it reads where they are emitted."""

    def found_in(self, run: SeenRun) -> RunFinding | None:
        """Return its finding in a run; None without one, or without its metrics."""
        evidence = self.look(run) if run.courses.emitted(self.reads) else None
        if evidence is None:
            return None
        return RunFinding(rule=self.name, numbers=evidence.numbers, causes=self.causes, change=evidence.change)


def short(value: float) -> str:
    """Return a number as short text.

    >>> short(0.123456), short(20.0)
    ('0.1235', '20')
    """
    return f"{value:.4g}"
