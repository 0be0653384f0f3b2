"""TRL: a flow as the rollout worker of its asynchronous trainer, and its weights to penstock's publishers."""

from .transfer import TRLTransfer
from .worker import TRLWorker

__all__ = ["TRLTransfer", "TRLWorker"]
