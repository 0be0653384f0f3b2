"""A model whose parameters and persistent buffers are views of a published version: there is no second copy of it.

Bringing the model to another version points its tensors elsewhere; no element is copied. The modules, and the
parameters that are not on the meta device, stay the objects they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import WeightsMismatch
from .meta_model import MetaMaterializer
from .weight_specs import FusedTensor, Part, TensorManifest, differing, fit, specs_of
from .weight_tables import table_differences
from .weights import Publication, WeightReader

__all__ = ["MountedViews", "Views"]


class _Slot(NamedTuple):
    """Where a module keeps a tensor."""

    tensors: dict[str, Any]
    """The module's parameters, or its buffers."""
    name: str

    @property
    def tensor(self) -> Tensor:
        """What is kept there."""
        tensor: Tensor = self.tensors[self.name]
        return tensor


class Views:
    """A model, and how its tensors are pointed to memory."""

    def __init__(
        self, model: nn.Module, published: TensorManifest, fused: Iterable[FusedTensor], whose: str, device: str
    ) -> None:
        """Hold `model` to what is published, and make up for what it lacks; its tensors stay where they are so far.

        Raises:
            WeightsMismatch: listing every difference, tensors on another device than the published ones, and what
                cannot be computed of a model that was built on the meta device. The model is as it was.
        """
        self._slots = dict(_slots(model))
        tensors = specs_of({name: slot.tensor for name, slot in self._slots.items()})
        self._parts, lines = fit(tensors, published.tensors, fused)
        materializer = MetaMaterializer(model, device)
        lines += table_differences(published.tables, model, materializer.buffers)
        refusals = [differing(lines, whose)] if lines else []
        refusals += [*self._elsewhere(device, whose), *materializer.refusals]
        if refusals:
            raise WeightsMismatch("\n".join(refusals))
        materializer.apply()
        model.requires_grad_(requires_grad=False)

    def _elsewhere(self, device: str, whose: str) -> Iterator[str]:
        wanted = {str(torch.device(device)), "meta"}
        found = [(name, str(slot.tensor.device)) for name, slot in self._slots.items()]
        if elsewhere := [f"{name}: {where}" for name, where in found if where not in wanted]:
            yield (
                f"{whose}: expected a model on {device} or meta, where its tensors can be views, found\n  "
                + "\n  ".join(elsewhere)
                + "\nAttach it with copied=True to have the weights copied"
            )

    def views(self, memory: Callable[[Part], Tensor]) -> list[Tensor]:
        """Tensors like the model's, in its order, of the bytes that `memory` gives for each."""
        return [memory(part).view(getattr(torch, part.spec.dtype)).view(part.spec.shape) for part in self._parts]

    def point_to(self, views: Sequence[Tensor]) -> None:
        """Make `views` the model's tensors. Nobody computes with it meanwhile."""
        made: dict[int, Tensor] = {}
        """What took the place of a tensor of the meta device: one for all that were tied."""
        for slot, view in zip(self._slots.values(), views, strict=True):
            tensor = slot.tensor
            if tensor.is_meta:
                slot.tensors[slot.name] = made.setdefault(id(tensor), _like(tensor, view))
            else:
                tensor.data = view


class MountedViews:
    """A model on a publisher's segment."""

    holds = True
    """The publisher must not write over what the model is views of."""

    def __init__(self, reader: WeightReader, model: nn.Module, fused: Iterable[FusedTensor], whose: str) -> None:
        """As `Views`."""
        self._reader = reader
        self._model = Views(model, reader.inventory, fused, whose, reader.memory.device)
        self._buffers: dict[int, list[Tensor]] = {}
        """Views of each of the two buffers."""

    def bring(self) -> Publication | None:
        """Point the model to the newest version, and say which it is; None if there is none yet."""
        newest = self._reader.newest()
        if newest is not None:
            self._model.point_to(self._views_of(newest.sequence))
        return newest

    def _views_of(self, sequence: int) -> list[Tensor]:
        def memory(part: Part) -> Tensor:
            return self._reader.memory.tensor(self._reader.start(sequence, part), part.spec.nbytes)

        if sequence % 2 not in self._buffers:
            self._buffers[sequence % 2] = self._model.views(memory)
        return self._buffers[sequence % 2]


def _like(tensor: Tensor, view: Tensor) -> Tensor:
    return nn.Parameter(view, requires_grad=False) if isinstance(tensor, nn.Parameter) else view.view(view.shape)


def _slots(model: nn.Module) -> Iterator[tuple[str, _Slot]]:
    """Every parameter and persistent buffer by its name; what is tied, under each of its names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        kept = module._non_persistent_buffers_set  # noqa: SLF001 (torch has no other way to ask)
        for name, tensor in module._parameters.items():  # noqa: SLF001 (where a tensor is replaced)
            if tensor is not None:
                yield dot + name, _Slot(module._parameters, name)  # noqa: SLF001 (as above)
        for name, tensor in module._buffers.items():  # noqa: SLF001 (as above)
            if tensor is not None and name not in kept:
                yield dot + name, _Slot(module._buffers, name)  # noqa: SLF001 (as above)
