"""StepClock: measures the time of each part of an optimizer step, without making the device wait."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch


class StepClock:
    """A clock that starts when it is made; `lap` ends a part."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[str] = []
        self._marks: list[Any] = [self._mark()]
        """Times of the host, or events that the device records when it reaches this point of its queued work."""

    def _mark(self) -> float | torch.Event:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def lap(self, part: str) -> None:
        """Add the time since the last lap to `part`."""
        self._parts.append(part)
        self._marks.append(self._mark())

    def seconds(self) -> dict[str, float]:
        """Return `timing_s/<part>` of each part. Waits for the device."""
        sums: dict[str, float] = {}
        for part, (start, end) in zip(self._parts, pairwise(self._marks), strict=True):
            name = f"timing_s/{part}"
            sums[name] = sums.get(name, 0.0) + _seconds(start, end)
        return sums


def _seconds(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
