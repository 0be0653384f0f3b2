"""The cells of the kill matrix: role of the victim, fault and moment; and the excluded combinations, with reasons.

Faults end a process from outside (SIGKILL, SIGTERM) or from within (`os._exit`, an exception), or stop it by SIGSTOP in
two forms. After a *stall* the others still wait, and continue. A *zombie* is disconnected before it continues: it was
stopped for longer than the heartbeat timeout of its peers, or than the stop timeout of its run.
"""

from __future__ import annotations

from itertools import product, starmap
from typing import Literal, TypeAlias, get_args

import msgspec

from penstock._pipeline.channels.heartbeat import DEFAULT_HEARTBEAT_TIMEOUT_S

__all__ = [
    "AT",
    "CELLS",
    "COMBINATIONS",
    "COUNT",
    "EXCLUDED",
    "HEARTBEAT_TIMEOUT_S",
    "SEGMENT_BYTES",
    "STOP_TIMEOUT_S",
    "Cell",
    "Fault",
    "Moment",
    "Role",
    "exclusion_reason",
]

Role: TypeAlias = Literal["producer", "consumer", "middle", "supervisor"]
"""producer, consumer: plain processes that `connect` and `serve` · middle: the worker of a stage between two others ·
supervisor: the process that runs the pipeline."""

Fault: TypeAlias = Literal["SIGKILL", "SIGTERM", "_exit", "exception", "stall", "zombie"]

Moment: TypeAlias = Literal["idle", "writing", "published", "reading", "committing", "shutdown"]
"""writing: half of a record's columns are in its slot · published: the record's header is written, its descriptor has
not left (before an exception: `send` has returned, nothing else has happened) · reading: the record's views are held ·
committing: the ledger has the commit, no other process knows of it · shutdown: Close was sent, nothing is
closed yet; a supervisor has just sent its worker SIGTERM."""

STOP_TIMEOUT_S = 0.3
"""The stop timeout of a worker, and the time that a zombie is waited for. A stall takes longer."""

HEARTBEAT_TIMEOUT_S = 2.0
"""The heartbeat timeout for a zombie: longer than a process waits for a core on a busy machine."""

SEGMENT_BYTES = 2**18
"""Bytes that a sender may have in flight: a small segment is created quickly."""

COUNT = 24
"""Groups to send."""

AT = 5
"""The number of the group at which the fault is injected."""


class Cell(msgspec.Struct, frozen=True):
    """One scenario."""

    role: Role
    fault: Fault
    moment: Moment

    def __str__(self) -> str:
        return f"{self.role}-{self.fault}-{self.moment}"

    @property
    def stops(self) -> bool:
        """Return whether the process is stopped, and continues later."""
        return self.fault in {"stall", "zombie"}

    @property
    def heartbeat_timeout_s(self) -> float:
        """Return the heartbeat timeout of its peers."""
        return HEARTBEAT_TIMEOUT_S if self.fault == "zombie" else DEFAULT_HEARTBEAT_TIMEOUT_S

    @property
    def dies(self) -> bool:
        """Return whether the process ends at once, without cleaning up."""
        plain = self.role not in {"middle", "supervisor"}  # a worker and a run end gracefully after SIGTERM
        return self.fault in {"SIGKILL", "_exit"} or (self.fault == "SIGTERM" and plain)


EXCLUDED: dict[tuple[Role | None, Fault | None, Moment | None], str] = {
    (None, "exception", "writing"): "columns are checked before they are copied: the copy cannot fail",
    ("producer", None, "reading"): "a producer holds nothing that it received",
    ("producer", None, "committing"): "a producer commits nothing",
    ("consumer", None, "writing"): "a consumer writes no slots",
    ("consumer", None, "published"): "a consumer publishes nothing",
    ("supervisor", "zombie", None): "no process disconnects a supervisor: its workers wait for it, and die with it",
}
"""Reasons for combinations that are not run; None stands for every role, fault or moment."""


def exclusion_reason(cell: Cell) -> str:
    """Return the reason for which a cell is excluded; empty if it is run."""
    for excluded, reason in EXCLUDED.items():
        if all(part in {None, own} for part, own in zip(excluded, msgspec.structs.astuple(cell), strict=True)):
            return reason
    return ""


COMBINATIONS = tuple(starmap(Cell, product(get_args(Role), get_args(Fault), get_args(Moment))))

CELLS = tuple(cell for cell in COMBINATIONS if not exclusion_reason(cell))
"""The cells that are run."""
