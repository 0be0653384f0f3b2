"""RoutingReplay: the experts that a trainer's mixture chooses for a batch, and the loss that balances its experts.

With R3 the routers choose those of the column `routed_experts`; tokens without a record, and all of R2, keep the choice
of the first pass over the batch in all its updates. See `contracts/routing.py`. Only the policy's own passes are
touched: a reference chooses by itself.

Axes: N tokens of a batch, F places of the rows of a micro-batch, L layers with experts, E experts that each chooses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from ..._pipeline.errors import InvalidConfig
from ..._schemas import Array, InvalidRecord, TrainBatch
from ..._schemas.choices import check_choice
from ..._schemas.numbers import finite_number
from ..contracts.routed_experts import RouterReplay
from ..contracts.routing import Routers, Routes, routers_of
from ..losses.metrics import Mean, Metric
from ..losses.terms import LossValue
from ..models.micro_batches import MicroBatch

COLUMN = "routed_experts"
"""The column of the engine's record."""

PLACES = "places"
"""Column [T] int64 of a micro-batch: the place of each token that trains among those of its batch."""

BALANCE = "router_aux_loss"
"""The metric: the load balancing loss, without its factor."""


class RoutingReplay:
    """Gives the routers of a model the experts of each micro-batch; without a mode and a factor, does nothing.

    Args:
        model: a `RoutedModel`, if there is a mode or a factor.
        mode: R2 or R3; None to let the routers choose in every pass.
        aux_loss: factor of the load balancing loss, 0 for none.
        compiled: whether the model is compiled.

    Raises:
        InvalidConfig: the model has no routers, or some whose choice cannot be given, or is compiled; another mode or
            factor.
    """

    def __init__(self, model: object, mode: RouterReplay | None, aux_loss: float, *, compiled: bool) -> None:
        if mode is not None:
            check_choice("router_replay", mode, RouterReplay)
        self._mode = mode
        self._factor = finite_number("router_aux_loss", aux_loss, zero=True)
        key = "router_replay" if mode else "router_aux_loss" if aux_loss else ""
        if key and compiled:
            raise InvalidConfig(f"{key}: expected a model that is not compiled, got compile=…: leave one of them out")
        self._routers: Routers | None = routers_of(model, key) if key else None
        self._balance = self._routers.balance_loss() if self._routers is not None and self._factor else None
        self._routes: dict[int, Routes] = {}
        """Of the micro-batches of the batch that is trained, by identity."""

    @property
    def needs_columns(self) -> tuple[str, ...]:
        """Return the column of the engine's record, with R3."""
        return (COLUMN,) if self._mode == "R3" else ()

    @property
    def options(self) -> dict[str, object]:
        """Return the arguments, for the facts of a run."""
        return {"router_replay": self._mode, "router_aux_loss": self._factor}

    def begin(self, batch: TrainBatch) -> Mapping[str, Array]:
        """Begin a batch, and return the column of places for its micro-batches.

        Raises:
            InvalidRecord: its record is absent, or of another model.
        """
        self._routes = {}
        if self._mode == "R3" and self._routers is not None:
            _check(batch.routed_experts, self._routers)
        return {PLACES: np.arange(len(batch.tokens))} if self._mode == "R3" else {}

    @contextmanager
    def choosing(self, part: MicroBatch, batch: TrainBatch) -> Iterator[None]:
        """Have the policy choose the experts of `part` within the body: its forward and its backward pass."""
        if self._routers is None:
            yield
            return
        routes = self._routes.get(id(part.columns))
        if routes is None or self._mode is None:
            given = _given(part, batch.routed_experts, self._routers.layers) if self._mode == "R3" else None
            routes = self._routes[id(part.columns)] = Routes(given, len(self._routers.layers))
        if self._balance is not None:
            routes.collect_logits()
        with self._routers.using(routes):
            yield

    def balanced(self, value: LossValue, part: MicroBatch, batch: TrainBatch) -> LossValue:
        """Return the loss of `part`, within `choosing`, with its share of the load balancing loss as its own metric.

        That of a batch is the mean over its micro-batches, each with the share of its tokens that train: a product of
        two means over tokens, it is no sum over tokens.
        """
        if self._balance is None:
            return value
        logits = self._routes[id(part.columns)].take_logits()
        balance = self._balance(logits, part.sequences.flatten() >= 0) * len(part.targets) / batch.loss_tokens
        metrics: dict[str, Metric] = {**value.metrics, BALANCE: Mean(balance.detach())}
        return LossValue(value.loss + self._factor * balance, metrics)


def _check(experts: Array | None, routers: Routers) -> None:
    """Check a record [N, L, E] of a batch."""
    if experts is None:
        raise InvalidRecord(
            f"{COLUMN}: expected the experts of the engine that sampled, for router_replay R3, got none: sample with "
            f"TorchPolicy(routed_experts=True) or HttpPolicy(routed_experts=…), or give R2"
        )
    _, layers, chosen = experts.shape
    if chosen != routers.chosen or layers not in {len(routers.layers), routers.depth}:
        raise InvalidRecord(
            f"{COLUMN}: expected {routers.chosen} experts of {len(routers.layers)} layers, or of all {routers.depth}, "
            f"as the model has, got {chosen} of {layers}: sample the same model"
        )
    if experts.size and experts.max() >= routers.experts:
        raise InvalidRecord(f"{COLUMN}: expected numbers below {routers.experts}, got {experts.max()}")


def _given(part: MicroBatch, experts: Array | None, layers: Sequence[int]) -> Tensor | None:
    """Return [F, L, E] the record of the tokens of `part`, zeros on padding, from one of its batch or of all layers."""
    if experts is None:
        return None
    places, real = places_of(part)
    found = experts[places]
    if experts.shape[1] != len(layers):
        found = found[:, layers]
    found = np.where(real[:, None, None], found, experts.dtype.type(0))
    return torch.from_numpy(found.astype(np.int32) if found.dtype == np.uint16 else found).to(part.tokens.device)


def places_of(part: MicroBatch) -> tuple[Array, Array]:
    """Return the place in the batch of each token of the rows, [F], and whether it is one, not padding, [F].

    The tokens of a sequence lie one behind the other in both, and each sequence has a token that trains.
    """
    owners = part.sequences.flatten().cpu().numpy()
    at = part.predicted_at.cpu().numpy() + 1
    shifts = np.zeros(max(int(owners.max(initial=-1)) + 1, 1), np.int64)
    shifts[owners[at]] = part.columns[PLACES].cpu().numpy() - at
    real = owners >= 0
    return np.where(real, np.arange(len(owners)) + shifts[owners], 0), real
