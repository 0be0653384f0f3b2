"""Tools for tests, penstock's and yours: drive a stage alone, build records, check a channel against the rules."""

from __future__ import annotations

from ._pipeline.graph.context import entered
from ._pipeline.testing.conformance import CHANNEL_RULES, Ends, MakeChannel, check_channel
from ._pipeline.testing.drive import (
    Driven,
    VirtualClock,
    batch,
    drive,
    drive_sink,
    drive_source,
    group,
    trajectory,
)

__all__ = [
    "CHANNEL_RULES",
    "Driven",
    "Ends",
    "MakeChannel",
    "VirtualClock",
    "batch",
    "check_channel",
    "drive",
    "drive_sink",
    "drive_source",
    "entered",
    "group",
    "trajectory",
]
