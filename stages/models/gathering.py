"""Gathering: tensors of which each rank has a part become whole, one at a time, on the leader alone.

A model that needs sharding fits no rank whole, and its optimizer's state even less. A tensor that a publication or a
checkpoint reads is gathered when it is read, and freed before the next one: no rank needs more memory than for the
largest.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .torch_sharding import is_sharded

PIECE_BYTES = 16 * 2**20
"""Bytes that a rank sends at once."""


def gathered(value: Any) -> Tensor:
    """Return a small tensor whole on every rank, such as a norm."""
    whole: Tensor = value.full_tensor() if is_sharded(value) else value
    return whole


@torch.no_grad()
def gathered_to_leader(sharded: Any) -> Tensor:
    """Return the whole of a sharded tensor on rank 0, and one on the meta device on the others; all ranks call this.

    1. Rows that are split over one dimension of the mesh, as `fully_shard` splits them, arrive in pieces where they
       belong: the leader needs memory for the whole and a piece, the others for a piece.
    2. A tensor that is split otherwise is whole on every rank for a moment.
    """
    split = [dimension for dimension, placement in enumerate(sharded.placements) if not placement.is_replicate()]
    leads = dist.get_rank() == 0
    if len(split) != 1 or not sharded.placements[split[0]].is_shard(0):
        whole = gathered(sharded)
        return whole if leads else _absent(sharded)
    group, mine = sharded.device_mesh.get_group(split[0]), sharded.to_local()
    if leads:
        return _received(sharded, mine, group)
    if 0 in dist.get_process_group_ranks(group):  # the rows of other replicas are the same
        _send(mine, sharded.device_mesh.device_type, group)
    return _absent(sharded)


def _received(sharded: Any, mine: Tensor, group: Any) -> Tensor:
    whole = torch.empty(sharded.shape, dtype=mine.dtype, device=mine.device)
    own, *others = torch.split(whole, -(-len(whole) // dist.get_world_size(group)))
    own.copy_(mine)
    device = sharded.device_mesh.device_type
    for rank, part in enumerate(others, start=1):
        for piece in _pieces(part):
            received = torch.empty_like(piece, device=device)
            dist.recv(received.view(torch.uint8), group=group, group_src=rank)
            piece.copy_(received)
    return whole


def _send(mine: Tensor, device: str, group: Any) -> None:
    for piece in _pieces(mine):
        dist.send(piece.to(device).contiguous().view(torch.uint8), group=group, group_dst=0)


def _pieces(rows: Tensor) -> tuple[Tensor, ...]:
    """Return rows in pieces of `PIECE_BYTES`, the same on the rank that sends them and on the leader."""
    return torch.split(rows, max(1, PIECE_BYTES // max(1, rows[:1].nbytes))) if len(rows) else ()


def _absent(sharded: Tensor) -> Tensor:
    return torch.empty(sharded.shape, dtype=sharded.dtype, device="meta")
