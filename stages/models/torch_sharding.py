"""Models that ranks share: with DistributedDataParallel each rank has all tensors, with FSDP2 a part of each.

Tensors that leave a trainer are whole (`gathered`); of tensors that enter it, each rank takes its part (`spread`). Both
are collective operations of all ranks. Knows no ranks, and only the sharding of a model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
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


def shard(model: nn.Module, layers: Iterable[nn.Module], device_type: str) -> None:
    """Shard `model` over all ranks, each of its `layers` and the rest (FSDP2)."""
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 (it takes a second)
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 (as above)

    mesh = init_device_mesh(device_type, (torch.distributed.get_world_size(),))
    for each in (*layers, model):
        fully_shard(each, mesh=mesh)


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


def gathered(value: Any) -> Any:
    """Return `value`, a tensor or a tree of dicts and lists, with every tensor whole."""
    if isinstance(value, dict):
        return {key: gathered(each) for key, each in value.items()}
    if isinstance(value, list):
        return [gathered(each) for each in value]
    return value.full_tensor() if _is_sharded(value) else value


def weights_of(model: CausalModel) -> dict[str, Tensor]:
    """Return the tensors of `model` by name, each whole; names of one tensor, such as tied embeddings, have one."""
    state: dict[str, Any] = model.state_dict()
    if not any(map(_is_sharded, state.values())):
        return state
    keeping: Any = model
    shards: dict[str, Tensor] = keeping.state_dict(
        keep_vars=True
    )  # the parameters themselves, equal where they are tied
    whole: dict[int, Tensor] = {}
    for shard in shards.values():
        if id(shard) not in whole:
            whole[id(shard)] = gathered(shard.detach())
    return {name: whole[id(shard)] for name, shard in shards.items()}


def spread(whole: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's part of each tensor that is sharded in `like`."""
    return {name: _part(tensor, like[name]) for name, tensor in whole.items()}


def spread_optimizer(state: dict[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
    """Return this rank's part of an optimizer's state: a tensor of its parameter's shape is sharded like that."""
    parts = {
        index: {
            name: _part(kept, parameters[index])
            if isinstance(kept, Tensor) and kept.shape == parameters[index].shape
            else kept
            for name, kept in of_one.items()
        }
        for index, of_one in state["state"].items()
    }
    return state | {"state": parts}


def _part(whole: Tensor, like: Any) -> Tensor:
    if not _is_sharded(like):
        return whole
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415 (it takes a second, and most models are not sharded)

    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _is_offloaded(value: Any) -> bool:
    return _is_sharded(value) and value.device_mesh.device_type != value.device.type


def _is_sharded(value: Any) -> bool:
    return isinstance(value, Tensor) and _is_a(value, "torch.distributed.tensor", "DTensor")


def _is_a(value: Any, module: str, name: str) -> bool:
    """Return whether it is an instance of a class in a module that is not imported here."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))
