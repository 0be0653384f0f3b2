"""Tensors of models on the meta device that are not in a state_dict, computed by the model's own code.

Non-persistent buffers and plain attributes that are tensors, mainly rotary frequencies, are computed by the module's
own constructor from its original arguments; there are no formulas or defaults here. They are computed on the host, like
those of a model that is loaded from a file, because a device may round differently. If the arguments are not attributes
of the module, or do not reproduce it, the error names them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_CHANGES = {"training"}
"""Attributes that change after construction."""


class MetaMaterializer:
    """Computes the tensors of a model that are on the meta device and not in its state_dict; `apply` sets them.

    A module is constructed again as `type(module)(…)`, where each argument is its attribute of that name (`config`, for
    example), and the result must equal the module in every attribute. It is constructed twice, with different random
    numbers: a tensor that differs cannot be computed. Parameters and persistent buffers are not changed.

    >>> class Rotary(nn.Module):
    ...     def __init__(self, theta):
    ...         super().__init__()
    ...         self.theta = theta
    ...         self.register_buffer("inv_freq", theta ** -torch.arange(0, 1, 0.5), persistent=False)
    >>> with torch.device("meta"):
    ...     rotary = Rotary(theta=100.0)
    >>> materializer = MetaMaterializer(rotary, "cpu")
    >>> materializer.refusals
    []
    >>> materializer.apply()
    >>> rotary.inv_freq
    tensor([1.0000, 0.1000])
    """

    def __init__(self, model: nn.Module, device: torch.device | str) -> None:
        """Compute the missing tensors of `model`, for `device`; the model does not change until `apply`."""
        self._made: list[tuple[nn.Module, dict[str, Tensor]]] = []
        self.buffers: dict[tuple[nn.Module, str], Tensor | None] = {}
        """The computed tensors, by module and name there; None for one that cannot be computed."""
        self.refusals: list[str] = []
        """One text with the tensors that cannot be computed and the reasons; empty if there are none."""
        lines: list[str] = []
        for name, module in model.named_modules():
            if left := dict(_left(module)):
                try:
                    made = _made(module, left, torch.device(device))
                    self._made.append((module, made))
                    self.buffers |= {(module, tensor): computed for tensor, computed in made.items()}
                except _CannotMaterialize as error:
                    lines += [f"{name or 'model'}.{tensor}: {error}" for tensor in left]
                    self.buffers |= {(module, tensor): None for tensor in left}
        if lines:
            self.refusals.append(
                f"{len(lines)} tensors on the meta device cannot be computed\n  " + "\n  ".join(lines) + "\n"
                f"Set them before the weights are attached, or build these modules on {device}"
            )

    def apply(self) -> None:
        """Set the computed tensors."""
        for module, tensors in self._made:
            for name, tensor in tensors.items():
                setattr(module, name, tensor)


class _CannotMaterialize(Exception):
    """The reason why a tensor cannot be computed."""


def _left(module: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """Yield tensors on the meta device that are not in a state_dict; None for an attribute that contains some."""
    for name in module._non_persistent_buffers_set:  # noqa: SLF001 (torch has no public function for it)
        buffer = module._buffers.get(name)  # noqa: SLF001 (as above)
        if buffer is not None and buffer.is_meta:
            yield name, buffer
    for name, value in vars(module).items():
        if _is_meta(value):
            yield name, value
        elif not name.startswith("_") and any(map(_is_meta, _contents(value))):
            yield name, None


def _is_meta(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _contents(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple | set) else []


def _made(module: nn.Module, left: Mapping[str, Tensor | None], device: torch.device) -> dict[str, Tensor]:
    for name, tensor in left.items():
        if tensor is None:
            raise _CannotMaterialize(f"expected a tensor, found {name} that contains some")
    again, once_more = (_again(module, seed) for seed in (0, 1))
    _check_same(module, again)
    for name in left:
        if not torch.equal(_bytes(getattr(again, name)), _bytes(getattr(once_more, name))):
            raise _CannotMaterialize(
                f"expected the same numbers whenever {type(module).__name__} is made, found random ones"
            )
    return {name: getattr(again, name).to(device, tensor.dtype) for name, tensor in left.items() if tensor is not None}


def _again(module: nn.Module, seed: int) -> nn.Module:
    """Construct `module` again, without changing the random state of this process."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return type(module)(**_arguments(module))


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of `tensor`: in these, NaN equals NaN."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _arguments(module: nn.Module) -> dict[str, Any]:
    """Return the arguments of the constructor, from the module's attributes."""
    arguments: dict[str, Any] = {}
    for name in inspect.signature(type(module)).parameters:
        if name == "device":
            arguments[name] = "cpu"
        elif name not in vars(module):
            raise _CannotMaterialize(
                f"expected {type(module).__name__} to keep its argument {name} as an attribute, found none"
            )
        else:
            arguments[name] = vars(module)[name]
    return arguments


def _check_same(module: nn.Module, again: nn.Module) -> None:
    """Raise if an attribute that the constructor sets is different in `module`."""
    for name, value in [*vars(again).items(), *again._buffers.items()]:  # noqa: SLF001 (torch has no public function for it)
        ours = getattr(module, name, None)
        if not name.startswith("_") and name not in _CHANGES and _essence(value) != _essence(ours):
            raise _CannotMaterialize(f"made again, {type(module).__name__} has {name} = {value!r}, expected {ours!r}")


def _essence(value: object) -> object:
    """Return the value that attributes are compared by."""
    if isinstance(value, Tensor):
        return value.shape
    if isinstance(value, np.ndarray):
        return value.tolist()
    return getattr(value, "__func__", value)
