"""Flows of penstock in the pipelines of ROLL. Imports ROLL only in the processes that ROLL starts."""

from __future__ import annotations

from .._stages.integrations.roll import FlowEnvManager, RollJob, ShapedEnvManager

__all__ = ["FlowEnvManager", "RollJob", "ShapedEnvManager"]
