"""Trackers of a run: its metrics, its samples and its hyper-parameters."""

from __future__ import annotations

from ._pipeline.accounting.sample import Sample
from ._pipeline.trackers.jsonl import Jsonl
from ._pipeline.trackers.tensorboard import TensorBoard
from ._pipeline.trackers.tracker import RunInfo, Tracker
from ._pipeline.trackers.wandb import WandB
from ._stages.sampling.samples import Samples

__all__ = ["Jsonl", "RunInfo", "Sample", "Samples", "TensorBoard", "Tracker", "WandB"]
