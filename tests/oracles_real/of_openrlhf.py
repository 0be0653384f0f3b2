"""Losses of OpenRLHF, called as its actor calls them."""

from __future__ import annotations

from typing import Any

from tests.oracles_real.batches import Batch, Peer
from tests.oracles_real.release import installed
from torch import Tensor

__all__ = ["OPENRLHF", "policy_loss"]

OPENRLHF = installed("openrlhf")


def policy_loss(**options: Any) -> Peer:
    """Return `PolicyLoss`."""

    def loss(batch: Batch) -> Tensor:
        made = OPENRLHF.get("openrlhf.models.loss", "PolicyLoss")(
            **{"clip_eps_low": 0.2, "clip_eps_high": 0.3} | options
        )
        value: Tensor
        value, *_ = made(batch.new, batch.old, batch.advantages, batch.floats, batch.rollout)
        return value

    return loss
