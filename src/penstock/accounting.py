"""The accounts of a run: the ledger of trajectories, metrics, statistics, events."""

from __future__ import annotations

from .pipeline.committed_prompts import CommittedPrompts
from .pipeline.ledger import Balance, EndState, Ledger
from .pipeline.statistics import JointStatistics, PipelineStatistics, StageStatistics, WorkerStatistics
from .pipeline.telemetry import JsonlMetrics, Metrics, MetricSink, get_logger

__all__ = [
    "Balance",
    "CommittedPrompts",
    "EndState",
    "JointStatistics",
    "JsonlMetrics",
    "Ledger",
    "MetricSink",
    "Metrics",
    "PipelineStatistics",
    "StageStatistics",
    "WorkerStatistics",
    "get_logger",
]
