"""The trainers that `SinkTrainer` feeds, as protocols, and the folders of their checkpoints."""

from __future__ import annotations

from ._pipeline.durability.resumption import ResumePoint, Stateful
from ._pipeline.util.checkpoint import latest_checkpoint, verify_checkpoint, write_checkpoint
from ._stages.sampling.evaluation import Evaluation
from ._stages.sink.sink_trainer import Checkpointed, Resumable, Trainer, WeightedTrainer

__all__ = [
    "Checkpointed",
    "Evaluation",
    "Resumable",
    "ResumePoint",
    "Stateful",
    "Trainer",
    "WeightedTrainer",
    "latest_checkpoint",
    "verify_checkpoint",
    "write_checkpoint",
]
