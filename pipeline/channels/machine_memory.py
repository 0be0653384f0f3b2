"""The memory that this process may still allocate, checked before it does, and that which it may ever have.

Anonymous shared memory has no limit of its own: where more is requested than the machine has, the kernel does not
refuse, it kills a process. So every allocation of a segment is checked here first.
"""

from __future__ import annotations

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUPS = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Return the bytes that can be allocated without swapping or exceeding a control group's limit."""
    return min([_machine("MemAvailable"), *(max(0, limit - used) for limit, used in _control_groups())])


def total_bytes() -> int:
    """Return the bytes that this process may ever have: those of the machine, or a control group's limit."""
    return min([_machine("MemTotal"), *(limit for limit, _ in _control_groups())])


def _machine(wanted: str) -> int:
    for line in MEMINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == wanted:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"expected {wanted} in {MEMINFO}")


def _control_groups() -> list[tuple[int, int]]:
    """Return each limit, and what is used: from this process' memory group up to the root, of both versions."""
    found: list[tuple[int, int]] = []
    for line in CGROUPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += _limits(CGROUP_ROOT, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            found += _limits(CGROUP_ROOT / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return found


def _limits(root: Path, path: str, limit: str, used: str) -> list[tuple[int, int]]:
    group = root / path.strip().lstrip("/")
    folders = [folder for folder in (group, *group.parents) if folder.is_relative_to(root)]
    bounds = [(folder, (folder / limit).read_text().strip()) for folder in folders if (folder / limit).exists()]
    return [(int(bound), int((folder / used).read_text())) for folder, bound in bounds if bound != "max"]
