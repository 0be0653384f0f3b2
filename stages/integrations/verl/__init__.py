"""verl: a flow as the agent loop manager of its trainer."""

from .callback import PenstockCheckpoint
from .manager import PenstockLoopManager

__all__ = ["PenstockCheckpoint", "PenstockLoopManager"]
