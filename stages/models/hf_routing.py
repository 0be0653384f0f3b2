"""The routers of transformers' mixtures of experts: their choice recorded, given, and balanced by a loss.

A model of transformers names the modules that compute its router logits (`_can_record_outputs`). Each returns its
logits, weights and the indices of the experts, which it finds by one `topk` over scores of all experts. That call is
what is recorded and replaced: indices are given, and values gathered from the scores at hand, so everything that a
router does before and after it (softmax, sigmoid, groups, norms, scales) stays its own, and gradients reach its
weights. A router that does otherwise is refused by its name.

Axes: F tokens of a call, row after row; E experts that a layer chooses for a token.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from inspect import Parameter, signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..._pipeline.errors import InvalidConfig
from ..contracts.routing import BalanceLoss, Routes, known

LEAST = 2
"""Experts of a token: zeros stand for no record, and are one where a token has a single expert."""

MATRIX = 2
"""Axes of the weights of a router, and of its scores."""

CHOICES = {torch.topk, Tensor.topk}
"""Functions that choose experts."""

LOGITS = "router_logits"
"""The name of transformers for the outputs of routers."""

LAYER = re.compile(r"layers\.(\d+)\.")
"""The number of a layer, in the name of a module."""


POSITIONAL = Parameter.POSITIONAL_OR_KEYWORD


class _Router(NamedTuple):
    """A module that chooses experts."""

    layer: int
    """Number of its layer, among all layers."""
    logits: int
    """Place of the logits among its outputs."""
    module: nn.Module


class HFRouters:
    """The routers of `module`, a causal model of transformers; see `Routers`. One call at a time.

    Raises:
        InvalidConfig: it has none, or one whose choice cannot be given.
    """

    def __init__(self, module: Any, name: str) -> None:
        self._kind, self._module = type(module).__name__, type(module).__module__
        self._name = name
        found = _routers(module)
        if not found:
            raise InvalidConfig(f"{name}: expected a mixture of experts, got a {self._kind}, which has no routers")
        tried = {_tried(router.module) for router in found}
        if None in tried or len(tried) != 1:
            raise self._unknown(found[0].module)
        experts, chosen = next(iter(tried)) or (0, 0)
        self.experts: int = experts
        self.chosen: int = chosen
        if self.chosen < LEAST:
            raise InvalidConfig(
                f"{name}: expected a mixture that chooses {LEAST} experts a token or more, got a {self._kind}, which "
                f"chooses {self.chosen}: train it without router_replay"
            )
        self.layers: tuple[int, ...] = tuple(router.layer for router in found)
        self.depth: int = module.config.get_text_config().num_hidden_layers
        self._routes: Routes | None = None
        """Those in use; None outside of `using`."""
        for place, (_, index, router) in enumerate(found):
            router.forward = partial(self._forward, place, index, router, router.forward)

    @contextmanager
    def using(self, routes: Routes) -> Iterator[Routes]:
        """Have calls within the body choose the experts of `routes`, and note those that they choose."""
        self._routes = routes
        try:
            yield routes
        finally:
            self._routes = None

    def balance_loss(self) -> BalanceLoss:
        """Return the load balancing loss of transformers for this model; see `Routers`."""
        own = getattr(sys.modules[self._module], "load_balancing_loss_func", None)
        if own is None:
            raise InvalidConfig(
                f"{self._name}: expected a model with a load balancing loss in transformers, for router_aux_loss, got "
                f"a {self._kind}: leave it out"
            )
        return lambda logits, real: own(tuple(logits), self.experts, self.chosen, real[None])

    def _forward(self, place: int, index: int, router: nn.Module, own: Any, *args: Any, **kwargs: Any) -> Any:
        routes = self._routes
        if routes is None:
            return own(*args, **kwargs)
        with _Choice(self.experts, self.chosen, routes.chosen(place)) as choice:
            outputs = own(*args, **kwargs)
        indices = choice.indices
        if indices is None or not any(output is indices for output in outputs):
            raise self._unknown(router)
        small = torch.uint8 if self.experts <= 2**8 else torch.int32
        routes.note(place, indices.to(small), outputs[index])
        return outputs

    def _unknown(self, router: nn.Module) -> InvalidConfig:
        return InvalidConfig(
            f"{self._name}: expected routers that return the indices of their experts, found by one topk over all, got "
            f"a {type(router).__name__} of a {self._kind}, whose choice cannot be recorded or given: train it without "
            f"router_replay and router_aux_loss"
        )


class _Choice(TorchFunctionMode):
    """Replaces the choice of a router within its body by a given one, where that is known."""

    def __init__(self, experts: int, chosen: int, given: Tensor | None) -> None:
        super().__init__()
        self._experts = experts
        self._chosen = chosen
        self._given = given
        self.indices: Tensor | None = None
        """[F, E] int64 of the choice; None before it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `function`, and replace its result if it is the choice."""
        if function not in CHOICES:
            return function(*args, **(kwargs or {}))
        # The same operations in every case, with a choice given or not: activations that are computed again in the
        # backward pass must save as many tensors as the first time.
        with torch.no_grad():
            found = function(*args, **(kwargs or {}))
        scores: Tensor = args[0]
        indices = found.indices
        if scores.shape[-1] == self._experts and indices.shape[-1] == self._chosen and scores.ndim == MATRIX:
            if self._given is not None:
                given = self._given.to(scores.device).long()
                indices = torch.where(known(given), given, indices)
            self.indices = indices
        return type(found)((scores.gather(-1, indices), indices))


class _Trial(TorchFunctionMode):
    """Collects the scores and the indices of each choice in its body."""

    def __init__(self) -> None:
        super().__init__()
        self._choices: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `function`."""
        found = function(*args, **(kwargs or {}))
        if function in CHOICES:
            self._choices.append((args[0], found.indices))
        return found

    def sizes(self, outputs: Any) -> tuple[int, int] | None:
        """Return the number of experts and of those chosen, of the choice that is among `outputs`; None if none is."""
        for scores, indices in self._choices:
            if isinstance(outputs, tuple) and any(each is indices for each in outputs) and scores.ndim == MATRIX:
                return int(scores.shape[-1]), int(indices.shape[-1])
        return None


def _routers(module: Any) -> list[_Router]:
    """Return the routers of a causal model of transformers, by its own table of outputs."""
    recorders = (getattr(module, "_can_record_outputs", None) or {}).get(LOGITS, ())
    found = []
    for recorder in recorders if isinstance(recorders, list | tuple) else [recorders]:
        kind: Any = getattr(recorder, "target_class", recorder)
        for name, each in module.named_modules():
            layer = LAYER.search(name)
            if isinstance(each, kind) and layer and (getattr(recorder, "layer_name", None) or "") in name:
                found.append(_Router(int(layer[1]), getattr(recorder, "index", 0), each))
    return sorted(found, key=lambda router: router.layer)


@torch.no_grad()
def _tried(router: nn.Module) -> tuple[int, int] | None:
    """Return the number of experts and of those that `router` chooses; None if its choice is not among its outputs.

    Calls it with tensors without memory in place of its own, which may be sharded, or not there yet.
    """
    tensors = {
        name: torch.empty(each.shape, dtype=each.dtype, device="meta")
        for name, each in [*router.named_parameters(), *router.named_buffers()]
    }
    experts, width = next((each.shape for each in tensors.values() if each.ndim == MATRIX), (0, 0))
    dtype = next(iter(tensors.values())).dtype
    required = [each for each in signature(router.forward).parameters.values() if each.default is Parameter.empty]
    biases = [torch.empty(experts, device="meta") for each in required[1:] if each.kind is POSITIONAL]
    for shape in ((2, width), (1, 2, width)):  # some take the rows of a batch, others all tokens
        arguments = (torch.empty(shape, dtype=dtype, device="meta"), *biases)
        trial = _Trial()
        with trial, suppress(AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            sizes = trial.sizes(torch.func.functional_call(router, tensors, arguments))
            if sizes is not None:
                return sizes
    return None
