"""The placement of a stage: `here()`, in the event loop of the pipeline, or `processes(n)` of its own.

Placement belongs to the edge, not to the stage: the same stage runs alone in a test, here, and in four processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ..._schemas.numbers import normalize_counts, normalize_numbers

STOP_TIMEOUT_S = 3.0
"""Seconds between SIGTERM and SIGKILL of a worker: a run that is interrupted ends within five seconds."""

START_TIMEOUT_S = 60.0
"""Seconds that a worker may take to import its stage and to connect."""


@dataclass(frozen=True, slots=True)
class Here:
    """The placement in the event loop that runs the pipeline."""

    def __str__(self) -> str:
        return "here"


@dataclass(frozen=True, slots=True)
class Processes:
    """The placement in processes of its own, each with its own copy of the stage."""

    count: int
    """Workers, each in one process."""
    restarts: int = 1
    """Times that each worker is restarted after it died, before the run fails."""
    stop_timeout_s: float = STOP_TIMEOUT_S
    """Seconds between SIGTERM and SIGKILL when a worker is stopped."""
    start_timeout_s: float = START_TIMEOUT_S
    """Seconds from the start of a worker's process until its stage begins; one that takes longer is killed."""

    def __post_init__(self) -> None:
        normalize_counts(self, "count")
        normalize_counts(self, "restarts", least=0)
        normalize_numbers(self, "stop_timeout_s", zero=True)
        normalize_numbers(self, "start_timeout_s")

    def __str__(self) -> str:
        processes = "1 process" if self.count == 1 else f"{self.count} processes"
        restarts = {0: "no restarts", 1: "1 restart each"}.get(self.restarts, f"{self.restarts} restarts each")
        return f"{processes}, {restarts}"


Placement: TypeAlias = Here | Processes

HERE = Here()
"""The default."""


def here() -> Here:
    """Place a stage in the event loop that runs the pipeline."""
    return HERE


def processes(
    count: int,
    *,
    restarts: int = 1,
    stop_timeout_s: float = STOP_TIMEOUT_S,
    start_timeout_s: float = START_TIMEOUT_S,
) -> Processes:
    """Place a stage in `count` processes. It is pickled to each, so it must open files and models in its `run`.

    A worker that dies (a signal, `os._exit`) is restarted up to `restarts` times, and the trajectories that it held are
    counted as lost. An exception in a worker ends the pipeline as it would here. A worker whose stage has not begun
    after `start_timeout_s` is killed, and counts as one that died.

    >>> processes(4, restarts=2)
    Processes(count=4, restarts=2, stop_timeout_s=3.0, start_timeout_s=60.0)

    Raises:
        InvalidConfig: fewer than one process, restarts that are no whole number or negative, seconds that are not
            finite or negative, or no time to start.
    """
    return Processes(count, restarts, stop_timeout_s, start_timeout_s)
