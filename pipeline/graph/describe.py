"""Describe a pipeline as text: each stage with its placement, each edge with its capacity."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from .placement import Joining, Ray
from .stage_node import StageNode


def drawn(nodes: Sequence[StageNode]) -> str:
    """Return the chain from top to bottom, one line for each stage and each edge."""
    width = max(len(node.name) for node in nodes)
    lines = [_stage(nodes[0], width)]
    for before, after in pairwise(nodes):
        lines += [f"  │ {_edge(before, after)}", _stage(after, width)]
    return "\n".join(lines)


def _stage(node: StageNode, width: int) -> str:
    return f"{node.name:<{width}}  {node.on}"


def _edge(before: StageNode, after: StageNode) -> str:
    if not (before.remote or after.remote):
        capacity = _records(after.memory_capacity)
        return f"memory: {capacity}" + (f", {_bytes(after.capacity_bytes)}" if after.capacity_bytes else "")
    transport = _transport({type(before.on), type(after.on)})
    capacity = f"{_records(after.remote_capacity)} and {_bytes(after.remote_capacity_bytes)}"
    return f"{transport}: {capacity} for each process"


def _transport(placements: set[type]) -> str:
    if Joining in placements:
        return "tcp"
    return "shm on this host, tcp elsewhere" if Ray in placements else "shm"


def _records(count: int) -> str:
    return "1 record" if count == 1 else f"{count} records"


def _bytes(count: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.4g} {unit}"
    return f"{count} B"
