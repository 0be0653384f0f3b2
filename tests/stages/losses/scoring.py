"""Build the arguments of losses by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from penstock._stages.losses.diagnostics import diagnostics
from penstock._stages.losses.distributions import Distributions, entropy_of
from penstock._stages.losses.metrics import check_used, merge
from penstock.losses import (
    CISPO,
    DPPO,
    GMPO,
    GSPO,
    KL,
    SAPO,
    VESPO,
    AdaptiveKL,
    AdvantageWeighted,
    Entropy,
    GeometricMask,
    ImportanceWeight,
    Loss,
    OffPolicyMask,
    PPOClip,
    ProductMask,
    SampledDistillation,
    Scored,
    TokenMask,
    WorstTokenMask,
)

LOSSES: list[Loss] = [
    AdvantageWeighted(),
    AdvantageWeighted().aggregated("seq-mean-token-mean"),
    AdvantageWeighted() * ImportanceWeight(high=1.2),
    PPOClip(),
    PPOClip(clip_high=0.4).aggregated("seq-mean-token-sum"),
    PPOClip(dual_clip=1.5).aggregated("seq-mean-token-sum-norm", longest=8),
    PPOClip(old="proximal") * ImportanceWeight(high=1.3, low=0.7, beyond="mask"),
    (PPOClip(old="proximal") * ImportanceWeight(level="sequence")).aggregated("seq-mean-token-mean"),
    GSPO(clip_low=0.1, clip_high=0.2).aggregated("seq-mean-token-mean"),
    GSPO(clip_low=0.1, clip_high=0.2, old="behavior").aggregated("seq-mean-token-mean", counted="all"),
    PPOClip(clip_high=0.4).aggregated("prompt-mean"),
    CISPO(highest=1.2),
    DPPO(low=0.05, high=0.1),
    SAPO().aggregated("seq-mean-token-mean"),
    SAPO(tau_pos=2.0, tau_neg=5.0, old="proximal") * ImportanceWeight() * WorstTokenMask(0.4, 2.5),
    PPOClip() * OffPolicyMask(0.01),
    (PPOClip() * GeometricMask(0.8, 1.2) * WorstTokenMask(0.3, 3.0)).aggregated("seq-mean-token-sum"),
    GMPO(0.1, 0.2).aggregated("seq-mean-token-mean"),
    (GMPO(old="proximal") * ImportanceWeight(high=1.4, level="geometric")).aggregated("seq-mean-token-sum"),
    VESPO(),
    VESPO(k_pos=1.0, lambda_pos=0.5).aggregated("seq-mean-token-sum"),
    PPOClip() * TokenMask(0.7, 1.4) * ProductMask(0.2, 5.0),
    PPOClip() + 0.1 * KL("k3+"),
    PPOClip() + 0.1 * KL("k3", unbiased="behavior"),
    PPOClip(old="proximal") + 0.1 * KL("k1", unbiased="proximal"),
    PPOClip() + 0.1 * KL("k1"),
    (PPOClip() + 0.1 * KL("k2")).aggregated("seq-mean-token-sum"),
    PPOClip() + AdaptiveKL(0.1, 1.0),
    PPOClip() + 0.1 * KL("k3") - 0.01 * Entropy(),
    GSPO(old="proximal") * ImportanceWeight(high=math.inf, level="sequence") + KL() - Entropy(),
]
"""At least one of each kind."""

HOLDING: list[Loss] = [
    CISPO(highest=1.2),
    CISPO(lowest=0.8, highest=1.2).aggregated("seq-mean-token-sum"),
    DPPO(low=0.05, high=0.1),
    DPPO("kl", low=0.01, high=0.02, highest=1.1).aggregated("seq-mean-token-sum"),
    AdvantageWeighted() * ImportanceWeight(high=1.2),
    (AdvantageWeighted() * ImportanceWeight(high=1.3, low=0.7, beyond="mask")).aggregated("seq-mean-token-mean"),
    AdvantageWeighted() * ImportanceWeight(high=3.0, low=0.3, level="sequence", beyond="mask"),
    VESPO(),
    VESPO(k_pos=1.0, lambda_pos=0.5).aggregated("seq-mean-token-sum"),
    SampledDistillation(),
    SampledDistillation() * ImportanceWeight(high=1.2),
    AdvantageWeighted() * ImportanceWeight(high=1.2) + 0.5 * SampledDistillation(),
]
"""Losses with a factor that is computed from the policy and has no gradient: a finite difference would change it."""


STRAIGHT_THROUGH: list[Loss] = [PPOClip() + 0.1 * KL("k3+")]
"""Losses whose gradient is not that of their value."""


def scored(logprobs: Tensor, advantages: Tensor, *, lengths: list[int] | None = None, **columns: Any) -> Scored:
    """Return one sequence, or several of these `lengths`, as a batch of one group."""
    kept = [len(logprobs)] if lengths is None else lengths
    predicted, temperature = columns.pop("predicted", logprobs[:, None]), columns.pop("temperature", 1.0)
    given: dict[str, Any] = distributed(predicted, temperature) | {
        "tokens": torch.zeros(len(logprobs), dtype=torch.int64),
        "lengths": torch.tensor(kept),
        "loss_tokens": len(logprobs),
        "loss_rollouts": sum(length > 0 for length in kept),
        "total_rollouts": len(kept),
        "loss_groups": int(len(logprobs) > 0),
        "group_tokens": torch.full((len(logprobs),), len(logprobs)),
    }
    return Scored(logprobs=logprobs, advantages=advantages, **(given | columns))


def distributed(predicted: Tensor, temperature: float = 1.0) -> dict[str, Any]:
    """Return the fields of tokens with log-probabilities `predicted` [T, V] at `temperature`."""
    return {
        "distributions": Distributions(predicted * temperature, temperature=temperature),
        "entropy": entropy_of(predicted),
    }


def predicting(given: Scored, predicted: Tensor, temperature: float = 1.0, **columns: Any) -> Scored:
    """Return `given` with log-probabilities `predicted` [T, V] at `temperature`."""
    return replace(given, **distributed(predicted, temperature), **columns)


def predicted_of(given: Scored) -> Tensor:
    """Return [T, V] the log-probabilities of all tokens."""
    return given.distributions.whole()


def random(seed: int = 0, lengths: tuple[int, ...] = (3, 6, 1, 4, 0)) -> Scored:
    """Return five sequences of float64, the first two of one prompt; policies differ by up to a factor e.

    The last has no token that trains.
    """
    generator = torch.Generator().manual_seed(seed)
    count = sum(lengths)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    predicted = torch.log_softmax(uniform(count, 3), dim=-1)
    first = sum(lengths[:2])
    return scored(
        -uniform(count),
        uniform(count) - 0.5,
        lengths=list(lengths),
        predicted=predicted,
        behavior_logprobs=-uniform(count),
        proximal_logprobs=-uniform(count),
        ref_logprobs=-uniform(count),
        loss_groups=2 if count > first else 1,
        group_tokens=torch.tensor([first] * first + [count - first] * (count - first)),
    )


def part_of(whole: Scored, sequences: Tensor) -> Scored:
    """Return a micro-batch: some sequences of the whole, with the totals of the whole."""
    owner = torch.arange(len(whole.lengths)).repeat_interleave(whole.lengths)
    tokens = torch.isin(owner, sequences)
    columns = {field.name: getattr(whole, field.name) for field in fields(whole)}
    taken: dict[str, Any] = {
        name: column[tokens] for name, column in columns.items() if isinstance(column, Tensor) and name != "lengths"
    }
    return replace(whole, lengths=whole.lengths[sequences], distributions=whole.distributions[tokens], **taken)


def reported(*micro_batches: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a batch as a trainer reports them, merged from those of its micro-batches.

    Raises:
        InvalidRecord: a term could use none of the batch's tokens.
    """
    merged: dict[str, Any] = {}
    for metrics in micro_batches:
        merge(merged, metrics)
    check_used(merged)
    return {name: metric.value() for name, metric in merged.items()}


def diagnosed(*micro_batches: Scored) -> dict[str, float]:
    """Return the metrics that a trainer adds to those of any loss."""
    return reported(*[diagnostics(scored) for scored in micro_batches])


def slope(value: Tensor, variable: Tensor) -> Tensor:
    """Return the derivative of `value` with respect to `variable`."""
    (gradient,) = torch.autograd.grad(value, variable)
    return gradient
