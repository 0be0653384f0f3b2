"""The memory that a run uses: of this process, of its workers, of the CUDA devices. Reads /proc; imports no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

PROCESSES = Path("/proc")
PAGE_BYTES = os.sysconf("SC_PAGESIZE")


class DeviceUse(NamedTuple):
    """The memory of a CUDA device, by all processes that use it."""

    used_bytes: int
    total_bytes: int


class MemoryUse(NamedTuple):
    """Bytes in memory at one moment; a page that several processes share counts for each."""

    here_bytes: int
    workers_bytes: int
    devices: tuple[DeviceUse, ...] = ()
    """By number; empty where this process uses no CUDA."""


NONE = MemoryUse(0, 0)


def memory_use(workers: Iterable[int]) -> MemoryUse:
    """Return the memory in use now; `workers` are the ids of the worker processes. Reads files."""
    return MemoryUse(_resident(os.getpid()), sum(_resident(pid) for pid in workers), tuple(_devices()))


def _resident(pid: int) -> int:
    """Return the bytes of a process that are in memory; 0 where it has ended."""
    with suppress(OSError):
        return int((PROCESSES / str(pid) / "statm").read_text().split()[1]) * PAGE_BYTES
    return 0


def _devices() -> list[DeviceUse]:
    """Return the use of each device, where torch is imported and uses CUDA already: a look must not begin that."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    found = []
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        found.append(DeviceUse(total - free, total))
    return found
