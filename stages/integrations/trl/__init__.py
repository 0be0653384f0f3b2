"""TRL: a flow as the rollout worker of its asynchronous trainer, and its weights to penstock's publishers."""

from .rollout_func import Rollouts, flow_reward, rollout_func
from .transfer import TRLTransfer
from .worker import TRLWorker

__all__ = ["Rollouts", "TRLTransfer", "TRLWorker", "flow_reward", "rollout_func"]
