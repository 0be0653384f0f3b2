"""The cells of the kill matrix: who is struck, by what, in which moment; and the ones that make no sense, with why.

Faults: what ends a process from outside (SIGKILL, SIGTERM) or from within (`os._exit`, an exception), and SIGSTOP in
two forms. After a *stall* the others are still waiting, and go on. A *zombie* has been given up when it wakes: it was
silent for longer than its peers bear, or whoever ran it had enough.
"""

from __future__ import annotations

from itertools import product, starmap
from typing import Literal, TypeAlias, get_args

import msgspec

from penstock._pipeline.channels.heartbeat import DEFAULT_HEARTBEAT_TIMEOUT_S

__all__ = [
    "AT",
    "BOUND_S",
    "CELLS",
    "COMBINATIONS",
    "COUNT",
    "SEGMENT_BYTES",
    "SENSELESS",
    "SILENCE_S",
    "Cell",
    "Fault",
    "Moment",
    "Role",
    "why_not",
]

Role: TypeAlias = Literal["producer", "consumer", "middle", "supervisor"]
"""producer, consumer: plain processes that `connect` and `serve` · middle: the worker of a stage between two others ·
supervisor: the process that runs the pipeline."""

Fault: TypeAlias = Literal["SIGKILL", "SIGTERM", "_exit", "exception", "stall", "zombie"]

Moment: TypeAlias = Literal["idle", "writing", "published", "reading", "committing", "shutdown"]
"""writing: half of a record's columns are in its slot · published: the record's header is written, its descriptor has
not left (before an exception: `send` has returned, nothing else has happened) · reading: the record's views are held ·
committing: the ledger has been told, nobody else has · shutdown: the end of the channel has been told, nothing is
closed yet; a supervisor has just told its worker to stop."""

BOUND_S = 0.3
"""How long whoever runs a zombie has patience, and a worker to stop. A stall takes longer."""

SILENCE_S = 2.0
"""How long a zombie may be silent: longer than a process waits for a core on a busy machine."""

SEGMENT_BYTES = 2**18
"""What a sender may have in flight: a small segment is made fast."""

COUNT = 24
"""Groups that are to be sent."""

AT = 5
"""The group that is struck."""


class Cell(msgspec.Struct, frozen=True):
    """One scenario."""

    role: Role
    fault: Fault
    moment: Moment

    def __str__(self) -> str:
        return f"{self.role}-{self.fault}-{self.moment}"

    @property
    def stops(self) -> bool:
        """Whether the process is stopped, and goes on later."""
        return self.fault in {"stall", "zombie"}

    @property
    def heartbeat_timeout_s(self) -> float:
        """What its peers bear."""
        return SILENCE_S if self.fault == "zombie" else DEFAULT_HEARTBEAT_TIMEOUT_S

    @property
    def dies(self) -> bool:
        """Whether the process is gone at once, without a chance to clean up."""
        plain = self.role not in {"middle", "supervisor"}  # a worker and a run end in good order when they are told to
        return self.fault in {"SIGKILL", "_exit"} or (self.fault == "SIGTERM" and plain)


SENSELESS: dict[tuple[Role | None, Fault | None, Moment | None], str] = {
    (None, "exception", "writing"): "columns are checked before they are copied: the copy cannot fail",
    ("producer", None, "reading"): "a producer holds nothing that it received",
    ("producer", None, "committing"): "a producer commits nothing",
    ("consumer", None, "writing"): "a consumer writes no slots",
    ("consumer", None, "published"): "a consumer publishes nothing",
    ("supervisor", "zombie", None): "nobody gives a supervisor up: its workers wait for it, and die with it",
}
"""Why a combination is not played; None stands for every fault or moment."""


def why_not(cell: Cell) -> str:
    """Why a cell makes no sense; empty where it does."""
    for senseless, reason in SENSELESS.items():
        if all(part in {None, own} for part, own in zip(senseless, msgspec.structs.astuple(cell), strict=True)):
            return reason
    return ""


COMBINATIONS = tuple(starmap(Cell, product(get_args(Role), get_args(Fault), get_args(Moment))))

CELLS = tuple(cell for cell in COMBINATIONS if not why_not(cell))
"""What is played."""
