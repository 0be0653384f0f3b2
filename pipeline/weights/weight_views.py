"""A model whose parameters and persistent buffers are views of a published version, without a second copy.

Loading another version replaces the views; no element is copied. Modules remain the same objects, and so do parameters
that are not on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import WeightsMismatch
from .meta_model import MetaMaterializer
from .weight_memory import TensorBuffer
from .weight_specs import FusedTensor, TensorManifest, differing, fit, specs_of
from .weight_tables import table_differences


class _Slot(NamedTuple):
    """A parameter or buffer of a module, by name."""

    tensors: dict[str, Any]
    """The module's parameters, or its buffers."""
    name: str

    @property
    def tensor(self) -> Tensor:
        """Its current value."""
        tensor: Tensor = self.tensors[self.name]
        return tensor


class MappedModel:
    """A model whose tensors are views of a version."""

    def __init__(
        self, model: nn.Module, published: TensorManifest, fused: Iterable[FusedTensor], whose: str, device: str
    ) -> None:
        """Compare `model` with `published`, and compute its missing tensors; the others change with `load`.

        Raises:
            WeightsMismatch: a list of every difference, of tensors on another device than the published ones, and of
                tensors on the meta device that cannot be computed. The model was not changed.
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
        self._views: WeakKeyDictionary[TensorBuffer, list[Tensor]] = WeakKeyDictionary()
        """Views of each buffer that still exists: a publisher alternates between two."""

    def _elsewhere(self, device: str, whose: str) -> Iterator[str]:
        wanted = {str(torch.device(device)), "meta"}
        found = [(name, str(slot.tensor.device)) for name, slot in self._slots.items()]
        if elsewhere := [f"{name}: {where}" for name, where in found if where not in wanted]:
            yield (
                f"{whose}: expected a model on {device} or meta, where its tensors can be views, found\n  "
                + "\n  ".join(elsewhere)
                + "\nAttach it with copied=True to have the weights copied"
            )

    def load(self, version: TensorBuffer) -> None:
        """Make views of `version` the model's tensors. You must not compute with the model at the same time."""
        made: dict[int, Tensor] = {}
        """The replacement of each tensor on the meta device: one for all that were tied."""
        if version not in self._views:
            self._views[version] = [version.tensor(part) for part in self._parts]
        for slot, view in zip(self._slots.values(), self._views[version], strict=True):
            tensor = slot.tensor
            if tensor.is_meta:
                slot.tensors[slot.name] = made.setdefault(id(tensor), _like(tensor, view))
            else:
                tensor.data = view


def _like(tensor: Tensor, view: Tensor) -> Tensor:
    return nn.Parameter(view, requires_grad=False) if isinstance(tensor, nn.Parameter) else view.view(view.shape)


def _slots(model: nn.Module) -> Iterator[tuple[str, _Slot]]:
    """Yield every parameter and persistent buffer by its name; a tied one under each of its names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        kept = module._non_persistent_buffers_set  # noqa: SLF001 (torch has no public function for it)
        for name, tensor in module._parameters.items():  # noqa: SLF001 (a tensor is replaced there)
            if tensor is not None:
                yield dot + name, _Slot(module._parameters, name)  # noqa: SLF001 (as above)
        for name, tensor in module._buffers.items():  # noqa: SLF001 (as above)
            if tensor is not None and name not in kept:
                yield dot + name, _Slot(module._buffers, name)  # noqa: SLF001 (as above)
