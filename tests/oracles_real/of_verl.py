"""Losses of verl, called as its actor calls them."""

from __future__ import annotations

from typing import Any

from tests.oracles_real.batches import Batch, Peer
from tests.oracles_real.release import installed
from torch import Tensor

__all__ = ["CORE", "CORRECTION", "VERL", "policy_loss", "rejecting", "weighted"]

VERL = installed("verl")
CORE = "verl.trainer.ppo.core_algos"
CORRECTION = "verl.trainer.ppo.rollout_corr_helper"


def config_of(**options: Any) -> Any:
    """Return the configuration of an actor; options of `policy_loss` are those that the actor itself has not."""
    kind = VERL.get("verl.workers.config.actor", "ActorConfig")
    own = {name: value for name, value in options.items() if name in kind.__dataclass_fields__}
    given = {"strategy": "fsdp", "rollout_n": 1, "use_dynamic_bsz": True, **own}
    rest = {name: value for name, value in options.items() if name not in own}
    if rest:
        given["policy_loss"] = VERL.get("verl.workers.config.actor", "PolicyLossConfig")(**rest)
    return kind(**given)


def policy_loss(
    name: str, aggregation: str = "token-mean", old: str = "old", scale: int | None = None, **options: Any
) -> Peer:
    """Return the loss `compute_policy_loss_<name>`; `scale` is that of `seq-mean-token-sum-norm`."""

    def loss(batch: Batch) -> Tensor:
        config = config_of(**options)
        if scale is not None:
            config.global_batch_info["loss_scale_factor"] = scale
        value: Tensor
        value, _ = VERL.get(CORE, f"compute_policy_loss_{name}")(
            old_log_prob=getattr(batch, old),
            log_prob=batch.new,
            advantages=batch.advantages,
            response_mask=batch.floats,
            loss_agg_mode=aggregation,
            config=config,
        )
        return value

    return loss


def weighted(level: str, threshold: str | float, **options: Any) -> Peer:
    """Return PPO against the recomputed policy, times the weights of `compute_rollout_correction_weights`."""

    def loss(batch: Batch) -> Tensor:
        weights, _ = VERL.get(CORRECTION, "compute_rollout_correction_weights")(
            batch.old - batch.rollout, batch.floats, level, threshold
        )
        ppo, config = VERL.get(CORE, "compute_policy_loss_vanilla"), config_of(**options)
        value: Tensor
        value, _ = ppo(batch.old, batch.new, batch.advantages, batch.floats, "token-mean", config, weights)
        return value

    return loss


def rejecting(criteria: str, thresholds: str, **options: Any) -> Peer:
    """Return PPO over the tokens that `compute_rollout_rejection_mask` keeps, divided by all that train."""

    def loss(batch: Batch) -> Tensor:
        kept, _ = VERL.get(CORRECTION, "compute_rollout_rejection_mask")(
            batch.old - batch.rollout, batch.floats, criteria, thresholds
        )
        ppo, config = VERL.get(CORE, "compute_policy_loss_vanilla"), config_of(**options)
        value: Tensor
        value, _ = ppo(batch.old, batch.new, batch.advantages, kept, "token-sum", config)
        return value / batch.mask.sum()

    return loss
