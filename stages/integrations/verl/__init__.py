"""verl: a flow as the agent loop manager of its trainer, and as batches of its older kind."""

from .batches import DataProtoBatches
from .callback import PenstockCheckpoint
from .manager import PenstockLoopManager

__all__ = ["DataProtoBatches", "PenstockCheckpoint", "PenstockLoopManager"]
