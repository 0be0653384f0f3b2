"""The accounting of a run: the ledger of trajectories, metrics, statistics, events."""

from __future__ import annotations

from ._pipeline.committed_prompts import CommittedPrompts
from ._pipeline.ledger import Balance, EndState, Ledger
from ._pipeline.statistics import EdgeStatistics, PipelineStatistics, StageStatistics, WorkerStatistics
from ._pipeline.telemetry import JsonlMetrics, Metrics, MetricSink, get_logger

__all__ = [
    "Balance",
    "CommittedPrompts",
    "EdgeStatistics",
    "EndState",
    "JsonlMetrics",
    "Ledger",
    "MetricSink",
    "Metrics",
    "PipelineStatistics",
    "StageStatistics",
    "WorkerStatistics",
    "get_logger",
]
