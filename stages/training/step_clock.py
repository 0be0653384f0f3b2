"""StepClock: measures the time of each part of an optimizer step, without making the device wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch

__all__ = ["StepClock"]


class _Mark(Protocol):
    """A point in time."""

    def seconds_to(self, later: Any, /) -> float:
        """Return the time from this mark to `later`, in seconds."""
        ...


class _HostMark:
    def __init__(self) -> None:
        self._at = time.perf_counter()

    def seconds_to(self, later: _HostMark) -> float:
        return later._at - self._at


class _DeviceMark:
    """The time at which the device reaches this point of its queued work."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.Event(device, enable_timing=True)
        self._event.record()

    def seconds_to(self, later: _DeviceMark) -> float:
        later._event.synchronize()
        return self._event.elapsed_time(later._event) / 1000


class StepClock:
    """A clock that starts when it is made; `lap` ends a part."""

    def __init__(self, device: torch.device) -> None:
        self._mark: Callable[[], _Mark] = _HostMark if device.type == "cpu" else partial(_DeviceMark, device)
        self._parts: list[str] = []
        self._marks: list[_Mark] = [self._mark()]

    def lap(self, part: str) -> None:
        """Add the time since the last lap to `part`."""
        self._parts.append(part)
        self._marks.append(self._mark())

    def seconds(self) -> dict[str, float]:
        """Return `timing_s/<part>` of each part. Waits for the device."""
        sums: dict[str, float] = {}
        for part, (start, end) in zip(self._parts, pairwise(self._marks), strict=True):
            name = f"timing_s/{part}"
            sums[name] = sums.get(name, 0.0) + start.seconds_to(end)
        return sums
