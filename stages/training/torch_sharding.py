"""Models that ranks share: of one in DistributedDataParallel each rank has all, of one in FSDP2 each has a part.

What leaves a trainer is whole, whoever has it: `gathered`. What comes in is whole too, and each takes its part:
`spread`. All ranks do so together. Knows no ranks, and of a model only how it is shared.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .causal_model import CausalModel

__all__ = ["Trainable", "accumulating", "bare", "gathered", "is_shared", "spread", "spread_optimizer"]

Trainable: TypeAlias = CausalModel | DistributedDataParallel


def is_shared(model: Trainable) -> bool:
    """Whether several ranks train it."""
    return isinstance(model, DistributedDataParallel) or _is_a(model, "torch.distributed.fsdp", "FSDPModule")


def bare(model: Trainable) -> CausalModel:
    """The model itself, whose tensors have their own names."""
    inner: CausalModel = model.module if isinstance(model, DistributedDataParallel) else model
    return inner


def accumulating(model: Trainable, *, last: bool) -> AbstractContextManager[None]:
    """Within the body gradients are added up; with the `last` micro-batch those of all ranks."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext()


def gathered(value: Any) -> Any:
    """`value`, a tensor or a tree of dicts and lists, with every tensor whole."""
    if isinstance(value, dict):
        return {key: gathered(each) for key, each in value.items()}
    if isinstance(value, list):
        return [gathered(each) for each in value]
    return value.full_tensor() if _is_sharded(value) else value


def spread(whole: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of each tensor this rank's part, where `like` has one."""
    return {name: _part(tensor, like[name]) for name, tensor in whole.items()}


def spread_optimizer(state: dict[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
    """An optimizer's state likewise: what has the shape of its parameter is shared as that is."""
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
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415 (a second, and most models are not shared)

    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _is_sharded(value: Any) -> bool:
    return isinstance(value, Tensor) and _is_a(value, "torch.distributed.tensor", "DTensor")


def _is_a(value: Any, module: str, name: str) -> bool:
    """Whether it is an instance of a class whose module nobody has imported unless there are some."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))
