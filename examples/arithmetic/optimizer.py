"""Create the optimizer for reinforcement learning: AdamW, with a learning rate annealed towards zero."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["annealed_adamw"]

LEARNING_RATE = 1.2e-3
RAMP = 10
"""Steps until the full learning rate: Adam's first steps are large, and based on few gradients."""

FLOOR = 0.05
"""Share of the learning rate that is left at the end."""


def annealed_adamw(parameters: Iterable[torch.nn.Parameter], steps: int) -> torch.optim.Optimizer:
    """Return AdamW for a run of `steps` optimizer steps, with a linearly decreasing learning rate."""
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0)

    def share(step: int) -> float:
        return min((step + 1) / RAMP, max(FLOOR, 1 - step / steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    return optimizer
