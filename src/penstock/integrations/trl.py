"""Flows of penstock in the trainers of TRL. Imports TRL only where one trains; needs the extra `trl` there."""

from __future__ import annotations

from .._stages.integrations.trl import Rollouts, TRLTransfer, TRLWorker, flow_reward, rollout_func

__all__ = ["Rollouts", "TRLTransfer", "TRLWorker", "flow_reward", "rollout_func"]
