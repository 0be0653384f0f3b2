"""Losses of SkyRL, called as its workers call them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.oracles_real.batches import GROUPS, Batch, Peer
from tests.oracles_real.release import installed
from torch import Tensor

__all__ = ["BOUND", "PPO", "SKYRL", "policy_loss"]

SKYRL = installed("skyrl")
PPO = "skyrl.backends.skyrl_train.utils.ppo_utils"

BOUND = 20
"""`max_seq_len`, the constant of `seq_mean_token_sum_norm`."""

CORRECTION = {
    "tis_ratio_type": None,
    "sequence_mask_metric": None,
    "outlier_token_is_threshold_low": None,
    "outlier_token_is_threshold_high": None,
    "token_mask_is_threshold_low": None,
    "token_mask_is_threshold_high": None,
}

SECTIONS = ("cispo", "dppo", "sapo", "clip_cov", "kl_cov")


def config_of(reduction: str, correction: dict[str, Any], options: dict[str, Any]) -> Any:
    """Return the configuration of the algorithm; `cispo`, `dppo` and so on have sections of their own."""
    sections = {name: SimpleNamespace(**value) for name, value in options.items() if name in SECTIONS}
    own = {name: value for name, value in options.items() if name not in SECTIONS}
    corrected = SimpleNamespace(**CORRECTION | correction)
    return SimpleNamespace(loss_reduction=reduction, off_policy_correction=corrected, **sections, **own)


def policy_loss(
    name: str, reduction: str | None = "token_mean", *, correction: dict[str, Any] | None = None, **options: Any
) -> Peer:
    """Return the policy loss `name`, with advantages that are scaled for the reduction; None is a mean over tokens.

    With None the advantages are not scaled, and the sum that the function returns is divided: its losses by covariance
    would compare scaled advantages with bounds.
    """

    def loss(batch: Batch) -> Tensor:
        config = config_of(reduction or "token_mean", correction or {}, options)
        advantages = batch.advantages if reduction is None else scaled(batch, reduction)
        value: Tensor
        value, _ = SKYRL.get(PPO, name)(batch.new, batch.old, advantages, config, batch.floats, batch.rollout)
        return value / batch.mask.sum() if reduction is None else value

    return loss


def scaled(batch: Batch, reduction: str) -> Tensor:
    """Return the advantages, so that the sum of a loss is its reduction."""
    boundaries = [(GROUPS.index(each), GROUPS.index(each) + GROUPS.count(each)) for each in dict.fromkeys(GROUPS)]
    reduce = SKYRL.get(PPO, "apply_loss_reduction_to_advantages_minibatch")
    advantages: Tensor = reduce(batch.advantages, batch.floats, reduction, batch.sequences, BOUND, boundaries)
    return advantages
