"""Optimizers and references that change during training: weight-decay groups, schedules, and updates of a reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..._pipeline.errors import InvalidConfig
from ..._pipeline.weights.weight_specs import specs_of
from ..._schemas.numbers import finite_number, normalize_counts
from ..contracts.causal_model import CausalModel

FUSED = {"cpu", "cuda"}
"""Devices where `adamw` updates a parameter by one kernel: nine times as fast on a CPU with a matrix of 78 million
numbers, and without temporary tensors of its size."""

OptimizerRecipe: TypeAlias = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer of a model's parameters: `partial(torch.optim.AdamW, lr=1e-5)`."""

ScheduleRecipe: TypeAlias = Callable[[torch.optim.Optimizer], LRScheduler]
"""Makes the schedule of an optimizer's learning rate:
`partial(transformers.get_scheduler, "cosine", num_warmup_steps=10, num_training_steps=100)`."""


def adamw(
    parameters: Iterable[torch.nn.Parameter],
    *,
    lr: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> torch.optim.AdamW:
    """Return AdamW that decays matrices and no vectors: the weights of norms and the biases keep their size.

    Args:
        parameters: the parameters that train.
        lr: learning rate.
        weight_decay: decay of parameters of two or more dimensions.
        betas: decay rates of the two running means.
        eps: added to the denominator.

    Raises:
        InvalidConfig: a number out of range.
    """
    lr, eps = finite_number("lr", lr, zero=True), finite_number("eps", eps, zero=True)
    weight_decay = finite_number("weight_decay", weight_decay, zero=True)
    trained = list(parameters)
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    vectors = [parameter for parameter in trained if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    fused = all(parameter.device.type in FUSED for parameter in trained)
    used = [group for group in groups if group["params"]]
    return torch.optim.AdamW(used, lr=lr, betas=betas, eps=eps, fused=fused or None)


@dataclass(frozen=True, slots=True)
class ReferenceUpdates:
    """Moves the reference towards the policy: reference ← share · policy + (1 − share) · reference.

    >>> ReferenceUpdates(every=64)  # equal to the policy after every 64th step
    ReferenceUpdates(every=64, share=1.0)
    >>> ReferenceUpdates(share=0.01)  # a running average of the policy
    ReferenceUpdates(every=1, share=0.01)

    Source: `sync_ref_model` of TRL (`ref_model_sync_steps` is `every`, `ref_model_mixup_alpha` is `share`).

    Raises:
        InvalidConfig: `every` is not a whole number from 1 on, or `share` is not above 0 and at most 1.
    """

    every: int = 1
    """Steps between two updates."""
    share: float = 1.0
    """Share of the policy."""

    def __post_init__(self) -> None:
        normalize_counts(self, "every")
        if not 0 < finite_number("share", self.share) <= 1:
            raise InvalidConfig(f"share: expected more than 0 and at most 1, got {self.share}")

    @torch.no_grad()
    def apply(self, reference: CausalModel, policy: CausalModel, step: int) -> None:
        """Update `reference` if an update is due after `step`."""
        if step % self.every:
            return
        policy_tensors, own = policy.state_dict(), reference.state_dict()
        for spec in specs_of(own):
            if not spec.tied:  # else the tensor was updated under its first name
                own[spec.name].lerp_(policy_tensors[spec.name].to(own[spec.name]), self.share)
