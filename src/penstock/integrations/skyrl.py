"""Flows of penstock as the generator of SkyRL's trainers. Imports SkyRL only where one trains."""

from __future__ import annotations

from .._stages.integrations.skyrl import PenstockGenerator, SampleRequests, SkyRLPrompts, main

__all__ = ["PenstockGenerator", "SampleRequests", "SkyRLPrompts", "main"]
