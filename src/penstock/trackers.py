"""Trackers of a run: its metrics, its samples and its hyper-parameters."""

from __future__ import annotations

from ._pipeline.accounting.sample import Sample
from ._pipeline.trackers.jsonl import Jsonl
from ._pipeline.trackers.mlflow import MLflow
from ._pipeline.trackers.prometheus import Prometheus
from ._pipeline.trackers.tensorboard import TensorBoard
from ._pipeline.trackers.tracker import RunInfo, Tracker
from ._pipeline.trackers.trackio import Trackio
from ._pipeline.trackers.wandb import WandB
from ._stages.sampling.samples import Samples

__all__ = [
    "Jsonl",
    "MLflow",
    "Prometheus",
    "RunInfo",
    "Sample",
    "Samples",
    "TensorBoard",
    "Tracker",
    "Trackio",
    "WandB",
]
