"""LossScale: the factor of a loss in float16, where gradients below 6e-8 are 0 and above 65504 infinite.

The gradient of the float32 parameters is divided by it again. A gradient that overflows is not applied: the scale is
halved, and the caller computes the gradient of the same batch again, so that each batch trains. The scale is doubled
after 2,000 updates without an overflow. In every other dtype it is 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._pipeline.accounting.telemetry import get_logger

log = get_logger("penstock.torch_trainer")


class LossScale:
    """The scale of one trainer; see the module."""

    def __init__(self, autocast: torch.dtype | None, device: torch.device) -> None:
        self._scaler = torch.amp.GradScaler(device.type, enabled=autocast == torch.float16)
        self._skipped = 0
        """Updates that overflowed since `metrics` was called last."""

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss, multiplied by the scale."""
        product: Tensor = self._scaler.scale(loss)
        return product

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of the parameters of `optimizer` by the scale."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Apply gradients that are finite, and count the update."""
        self._scaler.step(optimizer)
        self._scaler.update()

    def lower(self) -> bool:
        """Halve the scale; return false if it is 1, so that it has no part in a gradient that is not finite."""
        scale = self._scaler.get_scale()
        if scale <= 1:
            return False
        self._scaler.update(scale / 2)
        self._skipped += 1
        log.warning("update_skipped", loss_scale=scale / 2, reason="the gradient overflowed; it is computed again")
        return True

    def metrics(self) -> dict[str, float]:
        """Return `loss_scale` and the `skipped_updates` since the last call; {} without a scale."""
        if not self._scaler.is_enabled():
            return {}
        skipped, self._skipped = self._skipped, 0
        return {"loss_scale": self._scaler.get_scale(), "skipped_updates": float(skipped)}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, empty where there is no scale."""
        state: dict[str, Any] = self._scaler.state_dict()
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Continue with the state of a checkpoint; with a new scale if its trainer had none."""
        if state and self._scaler.is_enabled():
            self._scaler.load_state_dict(state)
