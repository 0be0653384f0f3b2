"""Shared memory without a name: allocated in full at once, sealed against shrinking, freed with its last holder.

The kernel gives an anonymous file every page it has and then kills a process, instead of refusing. So the room that is
left is looked at first: on the machine, and in the control groups (containers) that this process is in.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from .errors import OutOfSharedMemory

__all__ = ["allocate", "available_bytes"]

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")


def allocate(nbytes: int, purpose: str) -> int:
    """An anonymous file of `nbytes` whose pages all exist, as a descriptor that the caller closes. Blocks.

    Raises:
        OutOfSharedMemory: there is less room; the message gives `purpose`, what was wanted and what there is.
    """
    room = available_bytes()
    if nbytes > room:
        raise OutOfSharedMemory(f"expected {nbytes} bytes of shared memory for {purpose}, got room for {room}")
    fd = os.memfd_create("penstock", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError as error:
        os.close(fd)
        raise OutOfSharedMemory(
            f"expected {nbytes} bytes of shared memory for {purpose}, got none ({error.strerror})"
        ) from error
    return fd


def available_bytes() -> int:
    """Bytes that this process could still allocate before the machine or one of its control groups is full."""
    return min([_machine_bytes(), *_cgroup_bytes()])


def _machine_bytes() -> int:
    fields = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _cgroup_bytes() -> Iterator[int]:
    """What is left in each control group around this process, where it has a limit (version 2, then version 1)."""
    for line in MEMBERSHIP.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _left(CGROUPS, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            yield from _left(CGROUPS / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")


def _left(root: Path, path: str, limit: str, usage: str) -> Iterator[int]:
    group = root / path.lstrip("/")
    for folder in [group, *group.parents]:
        if folder.is_relative_to(root):
            try:
                yield int((folder / limit).read_text()) - int((folder / usage).read_text())
            except (OSError, ValueError):  # no such group here, or no limit ("max")
                continue
