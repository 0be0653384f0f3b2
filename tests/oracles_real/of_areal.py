"""Losses of AReaL, called as its actor calls them. Its weights are of float32."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.oracles_real.batches import Batch, Peer
from tests.oracles_real.release import installed
from torch import Tensor

__all__ = ["AREAL", "FUNCTIONAL", "ppo", "sapo"]

AREAL = installed("areal")
FUNCTIONAL = "areal.utils.functional.functional"


def ppo(*, rejection: dict[str, Any] | None = None, **options: Any) -> Peer:
    """Return `ppo_actor_loss_fn`; `rejection` are the fields of its `rejection_sampling`."""

    def loss(batch: Batch) -> Tensor:
        rejecting = None if rejection is None else SimpleNamespace(**{"agg": "mean", "lower": None} | rejection)
        value: Tensor
        value, _ = AREAL.get(FUNCTIONAL, "ppo_actor_loss_fn")(
            batch.new,
            batch.old,
            batch.rollout,
            batch.advantages,
            loss_mask=batch.mask,
            rejection_sampling=rejecting,
            **{"eps_clip": 0.2, "eps_clip_higher": 0.3} | options,
        )
        return value

    return loss


def sapo(tau_pos: float, tau_neg: float) -> Peer:
    """Return `sapo_loss_fn`."""

    def loss(batch: Batch) -> Tensor:
        value: Tensor
        value, _ = AREAL.get(FUNCTIONAL, "sapo_loss_fn")(
            batch.new, batch.old, batch.advantages, tau_pos, tau_neg, batch.mask
        )
        return value

    return loss
