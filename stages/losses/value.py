"""The loss of a critic: the squared error of its values, clipped as the ratio of PPO is.

With V a value, V' the one before the updates on the batch, c the bound and R the return of a token:

    L = ½ · mean over tokens of max((V − R)², (clamp(V, V' − c, V' + c) − R)²)

verl's `compute_value_loss`. Axes: T tokens of a micro-batch that train.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .metrics import Mean
from .terms import LossValue


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float, loss_tokens: int) -> LossValue:
    """Return the loss of a micro-batch, and the share of its tokens beyond the bound: `clip_fraction`.

    Args:
        values: [T] float32; the gradient flows through them.
        old_values: [T] those before the updates on the batch.
        returns: [T] what they are to predict.
        clip: the bound on the change of a value.
        loss_tokens: tokens that train in the global batch.
    """
    within = values.clamp(old_values - clip, old_values + clip)
    free, clipped = (values - returns) ** 2, (within - returns) ** 2
    loss = 0.5 * torch.maximum(free, clipped).sum() / max(1, loss_tokens)
    beyond = (clipped > free).sum() / max(1, loss_tokens)
    return LossValue(loss, {"loss": Mean(loss.detach()), "clip_fraction": Mean(beyond)})
