"""The trainers that `SinkTrainer` feeds, as protocols; the folders of their checkpoints, and of recorded batches."""

from __future__ import annotations

from ._pipeline.durability.resumption import ResumePoint, Stateful
from ._pipeline.util.checkpoint import latest_checkpoint, verify_checkpoint, write_checkpoint
from ._stages.sampling.evaluation import Evaluation
from ._stages.senders.recording import Recording
from ._stages.sink.sink_trainer import Checkpointed, Resumable, Trainer, WeightedTrainer

__all__ = [
    "Checkpointed",
    "Evaluation",
    "Recording",
    "Resumable",
    "ResumePoint",
    "Stateful",
    "Trainer",
    "WeightedTrainer",
    "latest_checkpoint",
    "verify_checkpoint",
    "write_checkpoint",
]
