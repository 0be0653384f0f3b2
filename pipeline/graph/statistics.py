"""Statistics of a pipeline: frozen values, taken at one moment."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from ..channels.channel import ChannelStatistics

StageState: TypeAlias = Literal["not started", "running", "returned", "cancelled", "failed"]
"""returned: by itself · cancelled: by the pipeline, or because the stage after it had ended · failed: it raised."""

WorkerState: TypeAlias = Literal["starting", "running", "stopping", "finished", "failed", "dead"]
"""failed: its stage raised · dead: its process ended without reporting, by a signal or `os._exit`."""


class WorkerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of a stage that runs in processes."""

    name: str
    """`SourceEnv 2/4`: the second of four."""
    pid: int | None
    """Id of its present process, or of its last one; None before it was started."""
    state: WorkerState
    restarts: int
    """Times that it died and was restarted."""
    starting: str = ""
    """The phase of its start: `importing train.py`; "" at any other time."""
    node: str = ""
    """The address of its host, on Ray and where it joined; "" for a process of this host."""
    transport: str = ""
    """`shm` or `tcp`; "" before it has connected."""
    numa: str = ""
    """`node 1`, the NUMA node that it is bound to on its host, or the reason why it is not; likewise."""
    lag: int | None = None
    """Optimizer steps since the newest weights that sampled its last record; None before it has sent one."""


class StageStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one stage, and its waits."""

    name: str
    placement: str
    """`here`, or the number of processes and how often each may be restarted."""
    state: StageState
    waiting_for: str
    """The cause of its present wait, and its origin: `records from Batcher`, `credit from SinkTrainer`,
    `start of SourceEnv 2/4`, `workers to join at tcp://0.0.0.0:5555`; "" while busy."""
    waited_for_records_s: float
    """Seconds that it has waited for records in all, including the present wait.

    For a stage in processes: its workers added up, as of their last reports.
    """
    waited_for_credit_s: float
    """Seconds that it has waited for credit from the next channel in all; likewise."""
    dropped: dict[str, int]
    """Trajectories that it dropped here, by end state."""
    workers: tuple[WorkerStatistics, ...]
    """Its processes; empty where it runs here."""


class EdgeStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the channel between two stages."""

    upstream: str
    downstream: str
    trajectories: int
    """Trajectories that have passed; records that are neither groups nor batches are not counted."""
    channel: ChannelStatistics


class PipelineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Every stage and every edge, source first; both are empty before the first run."""

    stages: tuple[StageStatistics, ...]
    edges: tuple[EdgeStatistics, ...]
