"""Losses of slime, whose checkout `SLIME` names. Values of tokens, whose mean is taken here."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from tests.oracles_real.batches import Batch, Peer
from tests.oracles_real.release import checkout
from torch import Tensor

__all__ = ["PPO", "approx_kl", "cispo", "opsm", "ppo", "slime", "weighted"]

PPO = "slime.utils.ppo_utils"


def slime(module: str, name: str) -> Any:
    """Return a function of the checkout."""
    return checkout("SLIME").get(module, name)


def sequences(values: Tensor, batch: Batch) -> list[Tensor]:
    """Return the trained tokens of each sequence that has some."""
    return [row[mask] for row, mask in zip(values, batch.mask, strict=True) if mask.any()]


def ones(batch: Batch) -> list[Tensor]:
    """Return the masks of `sequences`."""
    return [torch.ones_like(each) for each in sequences(batch.new, batch)]


def clipped(batch: Batch, level: str, dual_clip: float | None) -> Tensor:
    new, old = sequences(batch.new, batch), sequences(batch.old, batch)
    if level == "sequence":
        divergence = slime(PPO, "compute_gspo_kl")(new, old, new, ones(batch))
    else:
        divergence = torch.cat(old) - torch.cat(new)
    values: Tensor
    values, _ = slime(PPO, "compute_policy_loss")(divergence, batch.advantages[batch.mask], 0.2, 0.3, dual_clip)
    return values


def ppo(level: str = "token", dual_clip: float | None = None) -> Peer:
    """Return `compute_policy_loss`; at the level "sequence" that of GSPO."""
    return lambda batch: clipped(batch, level, dual_clip).mean()


def cispo(low: float, high: float) -> Peer:
    """Return `compute_cispo_loss`."""

    def loss(batch: Batch) -> Tensor:
        new, old, advantages = (each[batch.mask] for each in (batch.new, batch.old, batch.advantages))
        values: Tensor
        values, _ = slime(PPO, "compute_cispo_loss")(old - new, new, advantages, low, high)
        return values.mean()

    return loss


def weighted(name: str, low: float, high: float) -> Peer:
    """Return PPO, times the weights of `vanilla_tis_function` or `icepop_function`."""

    def loss(batch: Batch) -> Tensor:
        values: Tensor
        values, *_ = slime("slime.backends.megatron_utils.loss", name)(
            SimpleNamespace(tis_clip_low=low, tis_clip=high),
            pg_loss=clipped(batch, "token", None),
            train_log_probs=sequences(batch.old, batch),
            rollout_log_probs=sequences(batch.rollout, batch),
            loss_masks=ones(batch),
        )
        return values.mean()

    return loss


def opsm(delta: float) -> Peer:
    """Return PPO, times the mask of `compute_opsm_mask` against the policy that sampled."""

    def loss(batch: Batch) -> Tensor:
        mask, _ = slime(PPO, "compute_opsm_mask")(
            SimpleNamespace(opsm_delta=delta),
            [each.detach() for each in sequences(batch.new, batch)],
            sequences(batch.rollout, batch),
            sequences(batch.advantages, batch),
            ones(batch),
        )
        values: Tensor = clipped(batch, "token", None) * mask
        return values.mean()

    return loss


def approx_kl(kind: str, *, with_ratio: bool = False) -> Callable[[Batch], Tensor]:
    """Return [T] the estimates of `compute_approx_kl`."""

    def estimates(batch: Batch) -> Tensor:
        new, old, reference = (each[batch.mask] for each in (batch.new, batch.old, batch.reference))
        values: Tensor = slime(PPO, "compute_approx_kl")(
            new, reference, kind, (new - old).exp() if with_ratio else None
        )
        return values

    return estimates
