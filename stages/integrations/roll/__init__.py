"""ROLL: a flow in the place of its environments, with groups for its queue; or penstock's environments in them."""

from .env_manager import FlowEnvManager
from .job import RollJob
from .shaped_env_manager import ShapedEnvManager

__all__ = ["FlowEnvManager", "RollJob", "ShapedEnvManager"]
