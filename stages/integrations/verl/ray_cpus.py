"""The CPUs that verl reserves in Ray before it trains, compared with those that Ray has.

Ray waits without a bound for CPUs that it lacks, and verl is silent meanwhile. Its first wait comes before it makes any
object of penstock, so `plugin` compares.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

from ...._pipeline.errors import InvalidPipeline
from .backend import NAME

UNITS = "transfer_queue.backend.SimpleStorage.num_data_storage_units"

COLOCATED = 3
"""CPUs that verl reserves with each GPU (`max_colocate_count` of single_controller/ray/base.py:192)."""


def reserved(config: Any) -> dict[str, int]:
    """Return the CPUs that verl reserves, by purpose."""
    backend, trainer = config.transfer_queue.backend, config.trainer
    simple = backend.storage_backend == "SimpleStorage"
    return {
        "for the controller of TransferQueue": 1,
        f"for its storage ({UNITS})": backend.SimpleStorage.num_data_storage_units if simple else 0,
        f"with GPUs ({COLOCATED} for each, of trainer.n_gpus_per_node * trainer.nnodes)": COLOCATED
        * trainer.n_gpus_per_node
        * trainer.nnodes,
    }


def check_cpus(config: Any, resources: Mapping[str, float]) -> None:
    """Check that a cluster with these resources has the CPUs that verl's configuration reserves.

    Raises:
        InvalidPipeline: it has fewer.
    """
    wanted, cpus = reserved(config), resources.get("CPU", 0.0)
    if sum(wanted.values()) > cpus:
        parts = ", ".join(f"{count} {purpose}" for purpose, count in wanted.items() if count)
        raise InvalidPipeline(
            f"verl: expected a Ray with at least {sum(wanted.values())} CPUs ({parts}), got {cpus:g}, and verl would "
            f"wait for ever: set {UNITS}=1, or start Ray with more CPUs (ray_kwargs.ray_init.num_cpus), which may be "
            f"more than the host has"
        )


def check_before_waiting() -> None:
    """Have TransferQueue compare the CPUs before it starts, where the configuration of verl names penstock."""
    try:
        functions: Any = importlib.import_module("transfer_queue")
        ray = importlib.import_module("ray")
    except ImportError:
        return  # a trainer of verl's older kind
    start = functions.init

    @functools.wraps(start)
    def init(conf: Any = None) -> Any:
        config = None if conf is None else conf._get_root()  # noqa: SLF001 (OmegaConf has no other way up)
        if config is not None and config is not conf and config.actor_rollout_ref.rollout.name == NAME:
            check_cpus(config, ray.cluster_resources())
        return start(conf)

    functions.init = init
