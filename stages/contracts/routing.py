"""Routing: the experts that the routers of a mixture of experts choose for the tokens of a call, recorded or given.

A router computes a logit for each expert, chooses the E largest, and weighs these by their logits. Two engines round
differently, so that near a tie they choose other experts, and log-probabilities differ by far more than rounding. With
`Routes` of the engine that sampled, a trainer's routers choose its experts, and weigh them by their own logits. Source:
Ma et al., "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers" (2025).

Knows no model, no trainer and no engine.

Axes: F tokens of a call, row after row; L layers with experts, E experts that each of them chooses for a token.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from ..._pipeline.errors import InvalidConfig


class Routes:
    """The experts of the tokens of a call: those that were given, then also those that the routers chose."""

    def __init__(self, given: Tensor | None, layers: int) -> None:
        """Hold the experts `given`, [F, L, E] of whole numbers, where they are `known`; None for none."""
        self._chosen: list[Tensor | None] = [None] * layers if given is None else [*given.unbind(1)]
        self._logits: dict[int, Tensor] | None = None
        """Of each layer, from `collect_logits` to `take_logits`."""

    def chosen(self, layer: int) -> Tensor | None:
        """Return [F, E] the experts that a layer shall choose; None if it chooses all of them."""
        return self._chosen[layer]

    def note(self, layer: int, chosen: Tensor, logits: Tensor) -> None:
        """Keep the choice [F, E] of a layer, so that a computation of the same tokens again makes no other."""
        self._chosen[layer] = chosen
        if self._logits is not None:
            self._logits[layer] = logits

    @property
    def all(self) -> Tensor:
        """Return [F, L, E] the experts of all tokens, after a call."""
        return torch.stack([chosen for chosen in self._chosen if chosen is not None], dim=1)

    def collect_logits(self) -> None:
        """Keep the logits of the next call too, for a loss on them."""
        self._logits = {}

    def take_logits(self) -> list[Tensor]:
        """Return the logits of each layer, [F, experts], and keep no more.

        Activations that are computed again in the backward pass bring others, of which no loss depends.
        """
        found, self._logits = self._logits or {}, None
        return [found[layer] for layer in sorted(found)]


def known(experts: Tensor) -> Tensor:
    """Return [F, 1], whether a record [F, E] is one: the experts of a token differ, and zeros stand for none."""
    return experts[:, :1] != experts[:, 1:2]


BalanceLoss: TypeAlias = Callable[[list[Tensor], Tensor], Tensor]
"""A loss [] of the logits [F, experts] of each layer, over the tokens [F] that are real: least for an equal use of all
experts. Source: Fedus et al., "Switch Transformers" (2021), equations 4 to 6."""


class Routers(Protocol):
    """The routers of a model, in the order of its layers."""

    @property
    def experts(self) -> int:
        """Return the number of experts of a layer."""
        ...

    @property
    def chosen(self) -> int:
        """Return E."""
        ...

    @property
    def layers(self) -> tuple[int, ...]:
        """Return the numbers of the layers with experts, among all `depth` layers."""
        ...

    @property
    def depth(self) -> int:
        """Return the number of layers of the model, those without experts included."""
        ...

    def using(self, routes: Routes) -> AbstractContextManager[Routes]:
        """Have all calls within the body choose the experts of `routes`, and note those that they choose.

        The body contains the backward pass of a call too, for activations may be computed again in it.
        """
        ...

    def balance_loss(self) -> BalanceLoss:
        """Return the load balancing loss of the model.

        Raises:
            InvalidConfig: the model has none.
        """
        ...


@runtime_checkable
class RoutedModel(Protocol):
    """A model that may be a mixture of experts, as `HFModel`."""

    def routers(self) -> Routers:
        """Return its routers.

        Raises:
            InvalidConfig: it has none, or routers whose choice cannot be given.
        """
        ...


def routers_of(model: object, key: str) -> Routers:
    """Return the routers of a model, for the option `key`.

    Raises:
        InvalidConfig: it has none, or routers whose choice cannot be given.
    """
    if not isinstance(model, RoutedModel):
        raise InvalidConfig(f"{key}: expected a mixture of experts, such as an HFModel, got a {type(model).__name__}")
    return model.routers()
