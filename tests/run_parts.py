"""The parts of a configured run, for tests that ask one of them without a whole run."""

from __future__ import annotations

from typing import Any

from penstock._stages.training_run.torch_critic_parts import value_model
from penstock._stages.training_run.torch_parts import RunParts, loss_of
from penstock.losses import Loss
from penstock.runs import RunConfig, load_run_config

__all__ = ["configured_loss", "run_parts", "value_model"]


def run_parts(config: RunConfig) -> RunParts:
    """Return what makes the parts of a run."""
    return RunParts(config)


def configured_loss(**algorithm: Any) -> Loss:
    """Return the loss of a run with these values of `algorithm`."""
    values: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "reward": {}}
    return loss_of(load_run_config(values | {"algorithm": algorithm}).algorithm)
