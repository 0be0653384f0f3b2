"""The trainers that `SinkTrainer` feeds, as protocols, and the folders of their checkpoints."""

from __future__ import annotations

from .pipeline.resumption import ResumePoint, Stateful
from .stages.sink_trainer import Checkpointed, Resumable, Trainer, WeightedTrainer
from .stages.training.checkpoint import latest_checkpoint, write_checkpoint

__all__ = [
    "Checkpointed",
    "Resumable",
    "ResumePoint",
    "Stateful",
    "Trainer",
    "WeightedTrainer",
    "latest_checkpoint",
    "write_checkpoint",
]
