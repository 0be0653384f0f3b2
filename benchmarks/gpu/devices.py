"""A device that benchmarks run on: its data sheet, its clock, its memory and its kernels.

All of torch's CUDA functions that these benchmarks call are here. On a CPU the same functions answer with what torch
has there: operators in place of kernels, and no data sheet.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["SHEETS", "Device", "Kernel", "Sheet"]


class Sheet(NamedTuple):
    """Numbers of a device that its maker states."""

    bfloat16_flops: float
    """Operations a second of dense matrix products in bfloat16."""
    bytes_per_s: float
    """Bandwidth of its memory."""


SHEETS = {
    "NVIDIA A100-SXM4-40GB": Sheet(312e12, 1.555e12),
    "NVIDIA A100-SXM4-80GB": Sheet(312e12, 2.039e12),
    "NVIDIA A100 80GB PCIe": Sheet(312e12, 1.935e12),
    "NVIDIA H100 PCIe": Sheet(756e12, 2.0e12),
    "NVIDIA H100 80GB HBM3": Sheet(989e12, 3.35e12),
    "NVIDIA H200": Sheet(989e12, 4.8e12),
}
"""By `torch.cuda.get_device_name`. Source: NVIDIA's data sheets of A100, H100 and H200, whose numbers with sparsity are
twice as high. A device that is missing has no share."""


class Kernel(NamedTuple):
    """A kernel that ran once, or on a CPU an operator."""

    name: str
    milliseconds: float
    ranges: tuple[str, ...]
    """Names of the operators and ranges that it ran in, the innermost first."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device of torch: `cpu`, or `cuda` with or without a number."""

    torch: torch.device

    @classmethod
    def of(cls, name: str) -> Self:
        """Return the device of this name of torch's."""
        return cls(torch.device(name))

    @property
    def is_gpu(self) -> bool:
        """Return whether it is a CUDA device."""
        return self.torch.type == "cuda"

    @property
    def name(self) -> str:
        """Return the name of the product, or `cpu`."""
        return torch.cuda.get_device_name(self.torch) if self.is_gpu else "cpu"

    @property
    def sheet(self) -> Sheet | None:
        """Return its data sheet; None if it is unknown."""
        return SHEETS.get(self.name)

    def described(self) -> dict[str, Any]:
        """Return the facts that a result is reported with."""
        facts = {"device": self.name, "torch": torch.__version__, "cuda": torch.version.cuda}
        return facts | ({} if self.sheet is None else self.sheet._asdict())

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds of `work` until the device has finished it."""
        self.finish()
        began = time.perf_counter()
        work()
        self.finish()
        return time.perf_counter() - began

    def finish(self) -> None:
        """Wait until the device has done what was queued."""
        if self.is_gpu:
            torch.cuda.synchronize(self.torch)

    def release(self) -> None:
        """Return the memory of deleted models to the device, and count its peak from here on."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.torch)

    def peak_gb(self) -> float | None:
        """Return the largest memory of tensors since `release`, in GB; None on a CPU."""
        return torch.cuda.max_memory_allocated(self.torch) / 1e9 if self.is_gpu else None

    def kernels(self, work: Callable[[], object]) -> list[Kernel]:
        """Return the kernels that `work` ran on the device, on a CPU its operators."""
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.is_gpu else [])]
        with profile(activities=activities) as profiled:
            work()
            self.finish()
        found = _launched if self.is_gpu else _computed
        return [kernel for event in profiled.events() or [] for kernel in found(event)]


def _launched(event: Any) -> list[Kernel]:
    """Return the kernels that an operator launched itself. A range of the profiler appears among its own kernels."""
    own = [each for each in event.kernels if each.name != event.name]
    return [Kernel(each.name, each.duration / 1000, _ranges(event)) for each in own]


def _computed(event: Any) -> list[Kernel]:
    """Return an operator of a CPU with its own time; none of a range, or of a function that called operators."""
    is_operator = "::" in event.name and not event.name.startswith("autograd::")
    return [Kernel(event.name, event.self_cpu_time_total / 1000, _ranges(event))] if is_operator else []


def _ranges(event: Any) -> tuple[str, ...]:
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    return tuple(names)
