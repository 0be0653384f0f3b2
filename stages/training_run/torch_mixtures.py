"""The keys of a configured run for mixtures of experts, compared with its model before anything starts."""

from __future__ import annotations

from ..contracts.routed_experts import RoutedExperts
from ..contracts.routing import routers_of
from ..models.hf_model import HFModel
from .run_config import RunConfig


def recorded_experts(config: RunConfig, folder: str) -> RoutedExperts | None:
    """Return the shape of the record that the engine makes of the experts it chooses; None if none is wanted. Blocks.

    Raises:
        InvalidConfig: the model in `folder` is no mixture, or one that the keys do not fit.
    """
    algorithm = config.algorithm
    if algorithm.router_replay is None and not algorithm.router_aux_loss:
        return None
    key = "router_replay" if algorithm.router_replay else "router_aux_loss"
    routers = routers_of(HFModel.empty(folder, attention=config.model.attention), f"config: algorithm.{key}")
    if algorithm.router_aux_loss:
        routers.balance_loss()
    if algorithm.router_replay != "R3":
        return None
    return RoutedExperts(layers=routers.depth, chosen=routers.chosen, experts=routers.experts)
