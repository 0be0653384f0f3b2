"""Policy-gradient losses over padded rows, and the per-token quantities they are made of.

Every loss sums over the tokens of one micro-batch and divides by the totals of the *global* batch, so that losses and
gradients of micro-batches add up to those of the whole (a mean of means does not). Metrics are shares of a global mean
for the same reason: add them up.

Alignment: everything lies where the batch's columns lie. Position t of a row speaks of token t, which was predicted by
the logits at t − 1; the first token of a row has no prediction.

Axes: B rows, L tokens, V vocabulary. Knows no model, no optimizer, no batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..schemas import InvalidRecord

__all__ = [
    "AdvantageWeighted",
    "Aggregation",
    "Loss",
    "LossValue",
    "PPOClip",
    "Scored",
    "aggregate",
    "kl_k3",
    "score_tokens",
]

Aggregation: TypeAlias = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]
"""How per-token losses become one number, by the names verl and ROLL use: the mean over all tokens; the mean over
sequences of their sums; the mean over sequences of their means."""

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ±20 before they are exponentiated: far outside any trust region, and still
finite."""


class Scored(NamedTuple):
    """What a loss sees of one micro-batch."""

    logprobs: Tensor
    """[B, L] log-probability of each token under the policy that trains; the gradient flows through it."""
    mask: Tensor
    """[B, L] bool, true on the tokens that train."""
    advantages: Tensor
    """[B, L]."""
    behavior_logprobs: Tensor | None
    """[B, L] log-probability under the policy that sampled."""
    loss_tokens: int
    """Tokens that train in the global batch."""
    loss_sequences: int
    """Sequences with at least one such token in the global batch."""

    def ratio(self) -> tuple[Tensor, Tensor]:
        """[B, L] π/π_behavior of each token, 1 where the mask is false, and its logarithm.

        Raises:
            InvalidRecord: the batch does not tell the behavior log-probabilities.
        """
        if self.behavior_logprobs is None:
            raise InvalidRecord(
                "behavior_logprobs: expected a column, got none: have the sampler record them, "
                "or train with AdvantageWeighted, which needs none"
            )
        difference = torch.where(self.mask, self.logprobs - self.behavior_logprobs, 0.0)
        log_ratio = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        return log_ratio.exp(), log_ratio

    def kept_advantages(self) -> Tensor:
        """[B, L] advantages, 0 where the mask is false: what is there, be it NaN, reaches neither loss nor gradient."""
        return torch.where(self.mask, self.advantages, 0.0)

    def token_mean(self, values: Tensor) -> Tensor:
        """This micro-batch's share of the mean of `values` [B, L] over the global batch's tokens."""
        return aggregate(values, self.mask, "token-mean", self.loss_tokens, self.loss_sequences)


class LossValue(NamedTuple):
    """What a loss makes of a micro-batch; both parts add up over micro-batches."""

    loss: Tensor
    """[] to be differentiated."""
    metrics: Mapping[str, Tensor]
    """[] each, detached."""


class Loss(Protocol):
    """A policy loss."""

    def __call__(self, scored: Scored, /) -> LossValue:
        """The loss of one micro-batch, as a share of the global batch's.

        Raises:
            InvalidRecord: the batch lacks a column that this loss needs.
        """
        ...


# -- per token -----------------------------------------------------------------------------------------------------


def score_tokens(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each of `tokens` [B, L] under the `logits` [B, L, V] one position before it, and the entropy.

    The labels are shifted: logits at t predict token t + 1. The first token of a row, which nothing predicts, gets 0.

    Returns:
        [B, L] log-probabilities, and [B, L] entropy in nats, detached, of the distribution each token was drawn from.
    """
    predicted = torch.log_softmax(logits[:, :-1], dim=-1)
    logprobs = predicted.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    with torch.no_grad():
        entropy = torch.special.entr(predicted.exp()).sum(-1)
    return pad(logprobs, (1, 0)), pad(entropy, (1, 0))


def kl_k3(log_ratio: Tensor) -> Tensor:
    """Per-token estimate of KL(p ‖ q) from samples of p, given log q/p: r − 1 − log r, never negative.

    Schulman, "Approximating KL Divergence" (2020), estimator k3: unbiased, and of lower variance than −log r.
    """
    return log_ratio.exp() - 1 - log_ratio


def aggregate(values: Tensor, mask: Tensor, aggregation: Aggregation, loss_tokens: int, loss_sequences: int) -> Tensor:
    """One number of `values` [B, L] where `mask` [B, L] is true: this micro-batch's share of the global batch's.

    A masked value never enters, not even a NaN. Where nothing trains, the share is 0.
    """
    kept = torch.where(mask, values, 0.0)
    if aggregation == "token-mean":
        return kept.sum() / max(1, loss_tokens)
    sums = kept.sum(dim=1)
    if aggregation == "seq-mean-token-mean":
        sums = sums / mask.sum(dim=1).clamp(min=1)
    return sums.sum() / max(1, loss_sequences)


# -- losses --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AdvantageWeighted:
    """−A · log π(token): the plain policy gradient, REINFORCE with whatever baseline is in the advantages.

    Williams, "Simple statistical gradient-following algorithms" (1992). With A = 1 it is supervised fine-tuning. Right
    on policy only: where the samples are stale, nothing bounds the step (see PPOClip).
    """

    aggregation: Aggregation = "token-mean"

    def __call__(self, scored: Scored, /) -> LossValue:
        """See `Loss`."""
        values = -scored.kept_advantages() * scored.logprobs
        return LossValue(_aggregated(values, scored, self.aggregation), {})


@dataclass(frozen=True, slots=True)
class PPOClip:
    """−min(r · A, clip(r, 1 − clip_low, 1 + clip_high) · A), where r = π/π_behavior of each token.

    Schulman et al., "Proximal Policy Optimization" (2017), with the behavior policy as the old one. `clip_high` above
    `clip_low` is clip-higher of DAPO (Yu et al., 2025). `dual_clip` c bounds the loss by −c · A where A < 0 (Ye et al.,
    "Mastering Complex Control in MOBA Games", 2020); c is above 1, and 3 is usual. Log-ratios are clamped to ±20.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    aggregation: Aggregation = "token-mean"

    def __post_init__(self) -> None:
        if not (0 < self.clip_low < 1 and self.clip_high > 0):
            raise ValueError(f"expected 0 < clip_low < 1 and clip_high > 0, got {self.clip_low} and {self.clip_high}")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"expected dual_clip above 1, got {self.dual_clip}")

    def __call__(self, scored: Scored, /) -> LossValue:
        """See `Loss`. `pg_clipfrac`: share of tokens whose ratio is clipped, `pg_clipfrac_lower`: by the dual clip."""
        advantages = scored.kept_advantages()
        ratio, _ = scored.ratio()
        unclipped = -ratio * advantages
        clipped = -ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages
        values = torch.maximum(unclipped, clipped)
        metrics = {"pg_clipfrac": scored.token_mean((clipped > unclipped).float())}
        if self.dual_clip is not None:
            bound = -self.dual_clip * advantages
            beyond = (advantages < 0) & (values > bound)
            values = torch.where(beyond, bound, values)
            metrics["pg_clipfrac_lower"] = scored.token_mean(beyond.float())
        return LossValue(_aggregated(values, scored, self.aggregation), metrics)


def _aggregated(values: Tensor, scored: Scored, aggregation: Aggregation) -> Tensor:
    return aggregate(values, scored.mask, aggregation, scored.loss_tokens, scored.loss_sequences)
