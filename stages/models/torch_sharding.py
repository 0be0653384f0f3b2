"""Models that ranks share: with DistributedDataParallel each rank has all tensors, with FSDP2 a part of each.

Of tensors that enter a trainer each rank takes its part; `gathering` joins those that leave it. Knows no ranks, and
only the sharding of a model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..contracts.causal_model import CausalModel

Trainable: TypeAlias = CausalModel | DistributedDataParallel


def is_shared(model: Trainable) -> bool:
    """Return whether several ranks train it."""
    return isinstance(model, DistributedDataParallel) or _is_a(model, "torch.distributed.fsdp", "FSDPModule")


def shard(
    model: nn.Module, layers: Iterable[nn.Module], device_type: str, gathered_as: torch.dtype | None = None
) -> None:
    """Shard `model` over all ranks, each of its `layers` and the rest (FSDP2).

    `gathered_as` is the dtype of the autocast around the model: layers are gathered in it, half the bytes of float32,
    and their gradients are summed in float32. The rest, embedding and head, is gathered as it is. None for all so.
    """
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 (it takes a second)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415 (as above)

    mesh = init_device_mesh(device_type, (torch.distributed.get_world_size(),))
    narrow = MixedPrecisionPolicy(
        gathered_as, None if gathered_as is None else torch.float32, cast_forward_inputs=False
    )
    for each in layers:
        fully_shard(each, mesh=mesh, mp_policy=narrow)
    fully_shard(model, mesh=mesh)


def bare(model: Trainable) -> CausalModel:
    """Return the model itself: its tensors have their own names."""
    inner: CausalModel = model.module if isinstance(model, DistributedDataParallel) else model
    return inner


def accumulating(model: Trainable, *, last: bool) -> AbstractContextManager[None]:
    """Accumulate gradients within the body; with the `last` micro-batch, reduce them over all ranks."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext()


def device_of(parameter: Tensor) -> torch.device:
    """Return the device that computes with `parameter`: that of its mesh, if CPUOffloadPolicy keeps it on the host."""
    offloaded: Any = parameter
    return torch.device(offloaded.device_mesh.device_type) if _is_offloaded(parameter) else parameter.device


def load_weights(model: CausalModel, whole: Mapping[str, Tensor]) -> None:
    """Load the tensors `whole`, named as in `model.state_dict()`; each rank takes its part of one after the other."""
    state = model.state_dict()
    if not any(map(is_sharded, state.values())):
        model.load_state_dict(dict(whole))
        return
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(part_of(whole[name], tensor))


def part_of(whole: Tensor, like: Any) -> Tensor:
    """Return this rank's part of `whole`, in memory of its own, if `like` is sharded; else `whole`."""
    if not is_sharded(like):
        return whole
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415 (it takes a second, and most models are not sharded)

    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def local(value: Any) -> Tensor:
    """Return this rank's part of a tensor; all of one that is not sharded."""
    part: Tensor = value.to_local() if is_sharded(value) else value
    return part


def _is_offloaded(value: Any) -> bool:
    return is_sharded(value) and value.device_mesh.device_type != value.device.type


def is_sharded(value: Any) -> bool:
    """Return whether it is a tensor of which each rank has a part."""
    return isinstance(value, Tensor) and _is_a(value, "torch.distributed.tensor", "DTensor")


def _is_a(value: Any, module: str, name: str) -> bool:
    """Return whether it is an instance of a class in a module that is not imported here."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))
