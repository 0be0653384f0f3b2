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
    """What is left of each limit, from this process' memory group up to the root; of both versions of cgroups."""
    left: list[int] = []
    for line in CGROUPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            left += _left(CGROUP_ROOT, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            left += _left(CGROUP_ROOT / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return left


def _left(root: Path, path: str, limit: str, used: str) -> list[int]:
    group = root / path.strip().lstrip("/")
    folders = [folder for folder in (group, *group.parents) if folder.is_relative_to(root)]
    bounds = [(folder, (folder / limit).read_text().strip()) for folder in folders if (folder / limit).exists()]
    return [max(0, int(bound) - int((folder / used).read_text())) for folder, bound in bounds if bound != "max"]
