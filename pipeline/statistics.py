"""What a pipeline says of itself: frozen values, taken at one moment."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from .channels.channel import ChannelStatistics
from .ledger import Balance

__all__ = [
    "EdgeStatistics",
    "PipelineStatistics",
    "Report",
    "StageState",
    "StageStatistics",
    "WorkerState",
    "WorkerStatistics",
]

StageState: TypeAlias = Literal["not started", "running", "returned", "cancelled", "failed"]
"""returned: its stream ended, or it had enough · cancelled: the pipeline, or the stage after it, needed no more."""

WorkerState: TypeAlias = Literal["starting", "running", "stopping", "finished", "failed", "dead"]
"""failed: it raised · dead: it ended without a word, by a signal or `os._exit`."""


class WorkerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of a stage that runs in processes."""

    name: str
    """`SourceEnv 2/4`: the second of four."""
    pid: int | None
    """The process that runs it now, or ran it last; None before it was started."""
    state: WorkerState
    restarts: int
    """How often it died and was started anew."""
    starting: str = ""
    """What it does while it starts: `importing train.py`; "" at any other time."""


class StageStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What one stage does, and what it has waited for."""

    name: str
    placement: str
    """`here`, or how many processes."""
    state: StageState
    waiting_for: str
    """What it waits for right now, and from whom: `records from Batcher`, `credit from SinkTrainer`,
    `start of SourceEnv 2/4`; "" while busy."""
    waited_for_records_s: float
    """Seconds that it has waited for records in all, the present wait included.

    Of a stage in processes: its workers added up, as they told with the last of their records.
    """
    waited_for_credit_s: float
    """Seconds that it has waited for room in the next channel in all; likewise."""
    dropped: dict[str, int]
    """Trajectories that it dropped here, by the state they ended in."""
    workers: tuple[WorkerStatistics, ...]
    """Its processes; none where it runs here."""


class EdgeStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What lies between two stages."""

    upstream: str
    downstream: str
    trajectories: int
    """Trajectories that passed so far; records that are neither groups nor batches are not counted."""
    channel: ChannelStatistics


class PipelineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Every stage and every edge, source first; both are empty before the first run."""

    stages: tuple[StageStatistics, ...]
    edges: tuple[EdgeStatistics, ...]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to."""

    stop_reason: str
    """`end of stream`, `SinkTrainer returned`, `stopped by SIGTERM`, `cancelled`, or the failure in a line:
    `opening failed: …` where no stage had begun."""
    seconds: float
    balance: Balance
    """The books at the end: nothing is in flight any more; what was, is lost with its reason."""
    in_flight: int
    """Trajectories that were in flight when the run ended, and were counted as lost then."""
    checkpoint: str = ""
    """Path of the last checkpoint that this run wrote; "" where it wrote none."""
    statistics: PipelineStatistics
    """As the stages left it."""

    @property
    def ended(self) -> dict[str, int]:
        """Trajectories that ended during the run, by state: in the balance, those in flight at its end are lost too."""
        return self.balance.ended | {"lost": self.balance.ended["lost"] - self.in_flight}
