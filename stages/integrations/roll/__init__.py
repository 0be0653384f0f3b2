"""ROLL: a flow in the place of its environments, whose groups go into its queue."""

from .env_manager import FlowEnvManager
from .job import RollJob

__all__ = ["FlowEnvManager", "RollJob"]
