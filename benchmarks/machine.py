"""Description of the machine, and resources of processes."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "cpu_seconds",
    "machine",
    "mapped_again_mb",
    "peak_from_here",
    "pss_bytes",
    "resident_mb",
    "tree_cpu_seconds",
]


def machine() -> dict[str, Any]:
    """Return the processor, the kernel and the Python version."""
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": model[0].partition(":")[2].strip() if model else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the processor time of all threads of these processes so far, in seconds with nanosecond resolution."""
    tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def tree_cpu_seconds(pid: int | None = None) -> float:
    """Return the processor time of a process, this one by default, and of those below it, ended or not, in seconds."""
    import psutil  # noqa: PLC0415 (comes with the frameworks beside which this measures)

    total = 0.0
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def pss_bytes(pids: Iterable[int]) -> dict[str, int]:
    """Return the memory of these processes, shared pages counted once: in all, and the shared-memory part."""
    totals = {"Pss": 0, "Pss_Shmem": 0}
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in totals:
                totals[name] += int(rest.split()[0]) * 1024
    return totals


def resident_mb(which: Literal["VmRSS", "VmHWM"]) -> float:
    """Return the resident memory of this process: that of now, or its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(which)).split()[1]) / 1024


def peak_from_here() -> float:
    """Count the peak of the resident memory of this process from here on, and return the memory of now, in MB."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident_mb("VmRSS")


def mapped_again_mb() -> float:
    """Return the part of the resident memory of this process that counts again: of parts of a file mapped twice."""
    first: dict[tuple[str, ...], int] = {}
    again = 0
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        _, _, offset, device, inode = mapping.split(None, 5)[:5]
        resident = int(mapping.partition("\nRss:")[2].split()[0])
        if inode != "0":
            again += min(resident, first.get((device, inode, offset), 0))
            first[device, inode, offset] = max(resident, first.get((device, inode, offset), 0))
    return again / 1024
