"""What penstock's own tests are made of, for yours: drive a stage alone, build records, hold a channel to the rules."""

from __future__ import annotations

from .pipeline.testing import Driven, VirtualClock, batch, drive, drive_sink, drive_source, group, trajectory

__all__ = ["Driven", "VirtualClock", "batch", "drive", "drive_sink", "drive_source", "group", "trajectory"]
