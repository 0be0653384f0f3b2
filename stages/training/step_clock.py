"""StepClock: where the time of an optimizer step goes, part by part, without making the device wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch

__all__ = ["StepClock"]


class _Mark(Protocol):
    """A moment."""

    def seconds_to(self, later: Any, /) -> float:
        """How much later the other is."""
        ...


class _HostMark:
    def __init__(self) -> None:
        self._at = time.perf_counter()

    def seconds_to(self, later: _HostMark) -> float:
        return later._at - self._at


class _DeviceMark:
    """When the device came to this point of its work, which the host only queues."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.Event(device, enable_timing=True)
        self._event.record()

    def seconds_to(self, later: _DeviceMark) -> float:
        later._event.synchronize()
        return self._event.elapsed_time(later._event) / 1000


class StepClock:
    """Runs from when it is made; `lap` ends a part."""

    def __init__(self, device: torch.device) -> None:
        self._mark: Callable[[], _Mark] = _HostMark if device.type == "cpu" else partial(_DeviceMark, device)
        self._parts: list[str] = []
        self._marks: list[_Mark] = [self._mark()]

    def lap(self, part: str) -> None:
        """What was done since the last lap was `part`; a part may have many."""
        self._parts.append(part)
        self._marks.append(self._mark())

    def seconds(self) -> dict[str, float]:
        """`timing_s/<part>` of each part. Waits for the device."""
        sums: dict[str, float] = {}
        for part, (begun, ended) in zip(self._parts, pairwise(self._marks), strict=True):
            name = f"timing_s/{part}"
            sums[name] = sums.get(name, 0.0) + begun.seconds_to(ended)
        return sums
