"""Flows of penstock in the trainer of verl. Imports verl only where one trains; needs the extra `verl` there."""

from __future__ import annotations

from .._stages.integrations.verl import DataProtoBatches, PenstockCheckpoint, PenstockLoopManager

__all__ = ["DataProtoBatches", "PenstockCheckpoint", "PenstockLoopManager"]
