"""What penstock's own tests are made of, for yours: drive one stage alone, build records, a virtual clock."""

from __future__ import annotations

from .pipeline.testing import Driven, VirtualClock, batch, drive, drive_sink, drive_source, group, trajectory

__all__ = ["Driven", "VirtualClock", "batch", "drive", "drive_sink", "drive_source", "group", "trajectory"]
