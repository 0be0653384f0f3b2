"""The loss of prime-rl, whose checkout `PRIME_RL` names: a sum over the tokens of each sequence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from tests.oracles_real.batches import Batch, Peer
from tests.oracles_real.release import checkout
from torch import Tensor

__all__ = ["default"]

LOSS = "prime_rl.trainer.rl.loss"


def prime_rl(name: str) -> Any:
    """Return a function of the checkout."""
    return checkout("PRIME_RL", "src").get(LOSS, name)


def sums(name: str, batch: Batch, *more: Any) -> Tensor:
    """Return the sum of a loss over the sequences, divided by the tokens that train."""
    kind, function = prime_rl("LossInputs"), prime_rl(name)
    columns = (batch.new, batch.rollout, batch.reference, batch.advantages, batch.mask)
    losses = [function(kind(*each), *more).loss for each in zip(*columns, strict=True)]
    return torch.stack(losses).sum() / batch.mask.sum()


def default(low: float, high: float) -> Peer:
    """Return `default_loss_fn` without its second term."""
    config = SimpleNamespace(dppo_mask_low=low, dppo_mask_high=high, adv_tau=1.0, kl_tau=0.0)
    return lambda batch: sums("default_loss_fn", batch, config)
