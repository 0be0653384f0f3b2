"""The accounting of a run: the ledger of trajectories, metrics, statistics, events."""

from __future__ import annotations

from ._pipeline.accounting.balance import Balance
from ._pipeline.accounting.committed_prompts import CommittedPrompts
from ._pipeline.accounting.end_states import EndState
from ._pipeline.accounting.ledger import Ledger
from ._pipeline.accounting.telemetry import JsonlMetrics, Metrics, MetricSink, get_logger
from ._pipeline.graph.statistics import EdgeStatistics, PipelineStatistics, StageStatistics, WorkerStatistics

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
