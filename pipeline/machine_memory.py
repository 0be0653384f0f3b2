"""How much memory this process may still take, before it takes it.

Anonymous shared memory knows no limit of its own: asked for more than the machine has, the kernel does not refuse, it
kills. So whoever allocates a segment asks here first.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["available_bytes"]

MEMINFO = Path("/proc/meminfo")
CGROUPS = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Bytes that can be allocated without swapping or breaking a control group's limit, as far as the kernel tells."""
    return min([_machine(), *_control_groups()])


def _machine() -> int:
    for line in MEMINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"expected MemAvailable in {MEMINFO}")


def _control_groups() -> list[int]:
    """What is left of each limit from this process' group (version 2) up to the root."""
    left: list[int] = []
    for line in CGROUPS.read_text().splitlines():
        if line.startswith("0::"):
            group = CGROUP_ROOT / line.removeprefix("0::").strip().lstrip("/")
            for folder in (group, *group.parents):
                if not folder.is_relative_to(CGROUP_ROOT):
                    break
                limit, used = folder / "memory.max", folder / "memory.current"
                if limit.exists() and (bound := limit.read_text().strip()) != "max":
                    left.append(max(0, int(bound) - int(used.read_text())))
    return left
