"""Bind a worker to one NUMA node of its host: memory is fast from the processors of its own node.

The kernel places memory on the node of the processor that touches it first, so threads that stay on a node have theirs
there. No library is needed, and no call that containers forbid: docs/decisions/0018-numa-nodes-by-affinity.md.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ..util.host_lock import open_host_lock
from ..util.lock_file import LockFile

NODES = Path("/sys/devices/system/node")

GPUS = Path("/proc/driver/nvidia/gpus")
"""A folder for each GPU of Nvidia, named by its address on the bus."""

DEVICES = Path("/sys/bus/pci/devices")

MOST_NODES = 1024
"""Of a host; the kernel's own bound."""

_own_place: LockFile | None = None
"""The file that workers count each other by; the byte that is this one's place is locked while it lives."""


def bind_to_node(on_host: int) -> str:
    """Bind all threads of this process to one NUMA node, unless it would lose processors that it can use.

    1. With GPUs, it is the node of those that this process may use, by `CUDA_VISIBLE_DEVICES`.
    2. Otherwise it is the node with the fewest workers of this user. A process that computes with more threads than a
       node has processors is not bound: `OMP_NUM_THREADS`, or its part of the processors.

    Args:
        on_host: processes that share the processors of this one.

    Returns:
        `node 1`, or `not bound: ` and the reason.
    """
    try:
        return _bind(on_host)
    except OSError as error:  # of /sys, of the lock, or of a sandbox
        return f"not bound: {error}"


def nodes_of(processors: set[int]) -> dict[int, set[int]]:
    """Return those of `processors` that each NUMA node has, by its number; nodes without any are left out. Blocks."""
    found = {int(path.name[4:]): _numbers_in(path / "cpulist") & processors for path in NODES.glob("node[0-9]*")}
    return {number: found[number] for number in sorted(found) if found[number]}


def _bind(on_host: int) -> str:
    processors = os.sched_getaffinity(0)
    nodes = nodes_of(processors)
    # 1. There is nothing to choose: the host has one node, or another program has bound this process.
    if len(nodes) <= 1:
        return f"node {next(iter(nodes))}" if nodes else f"not bound: {NODES} names no processors"
    # 2. Its GPUs choose.
    if gpus := _visible(os.environ.get("CUDA_VISIBLE_DEVICES")):
        return _bind_near(gpus, nodes)
    # 3. It would lose processors.
    threads = _threads(len(processors) // on_host)
    if not (large := [number for number, its in nodes.items() if len(its) >= threads]):
        return f"not bound: its {threads} threads (OMP_NUM_THREADS) are more than the processors of a node"
    # 4. It takes its place on the node with the fewest.
    number = _fewest_workers(large)
    _bind_threads(nodes[number])
    return f"node {number}"


def _threads(share: int) -> int:
    with suppress(ValueError):
        return int(os.environ.get("OMP_NUM_THREADS", ""))
    return share


def _visible(variable: str | None) -> list[str]:
    """Return the addresses of the GPUs that this process may use; empty ones where they are not known."""
    gpus = sorted(path.name for path in GPUS.glob("*"))
    if variable is None:
        return gpus
    by_name = {str(number): gpu for number, gpu in enumerate(gpus)}
    return [by_name.get(name.strip(), "") for name in variable.split(",") if name.strip() and gpus]


def _bind_near(gpus: list[str], nodes: Mapping[int, set[int]]) -> str:
    near = {_node_of(gpu) for gpu in gpus}
    if len(near) == 1 and (number := near.pop()) in nodes:
        _bind_threads(nodes[number])
        return f"node {number}"
    return "not bound: its GPUs are not of one node; CUDA_VISIBLE_DEVICES gives a process its own, by their numbers"


def _node_of(gpu: str) -> int:
    """Return the node of a GPU; −1 where it is not known."""
    path = DEVICES / gpu.lower() / "numa_node"
    return int(path.read_text()) if gpu and path.exists() else -1


def _fewest_workers(nodes: Sequence[int]) -> int:
    """Take the first free place on any of `nodes`, from all processes of this user; return its node."""
    global _own_place  # noqa: PLW0603 (it is the process that is bound)
    _own_place = open_host_lock("numa", "the places of workers")
    places = ((place, number) for place in itertools.count() for number in nodes)
    return next(number for place, number in places if _own_place.take(place * MOST_NODES + number))


def _bind_threads(processors: set[int]) -> None:
    """Bind every thread: those that a library started when it was imported too, and those they start meanwhile."""
    bound = set[str]()
    while new := {task.name for task in Path("/proc/self/task").iterdir()} - bound:
        for thread in new:
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), processors)
        bound |= new


def _numbers_in(path: Path) -> set[int]:
    """Return the numbers of a list as the kernel writes it: `0-3,8`."""
    numbers = set[int]()
    for part in filter(None, path.read_text().strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers
