"""A bound on the size of every tensor that a computation makes."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NoTensorOf(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Raises an error when a tensor of so many numbers is made, in the forward or the backward pass."""

    def __init__(self, numbers: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._numbers = numbers

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor) and each.numel() >= self._numbers:
                raise MemoryError(f"{function} made a tensor {list(each.shape)}")
        return made
