"""The argument of a loss: the tokens of a micro-batch that train, one sequence after another.

It contains no prompt, no padding and no mask: these cannot leak into a loss. The trainer has aligned the logits: row t
of `distributions` is the distribution that token t was drawn from.

Axes: T tokens that train, S sequences of the micro-batch, K candidates of a teacher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ..._schemas import InvalidRecord
from ..contracts.kl_estimate import LOG_RATIO_BOUND
from .distributions import Distributions

OldPolicy: TypeAlias = Literal["behavior", "proximal"]
"""The denominator of a ratio: the policy that sampled, or the policy when training on the batch began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The tokens of one micro-batch that train, scored by the policy."""

    distributions: Distributions
    """The distribution that each token was drawn from; gradients flow through it. Use `over`: a chunk at a time."""
    logprobs: Tensor
    """[T] log-probability of each token itself; the gradient flows through it."""
    entropy: Tensor
    """[T] entropy in nats of each distribution; the gradient flows through it."""
    tokens: Tensor
    """[T] int64 token ids."""
    lengths: Tensor
    """[S] int64 number of the T tokens in each sequence; they lie one sequence after another."""
    loss_tokens: int
    """Tokens that train in the *global* batch."""
    loss_rollouts: int
    """Rollouts with at least one such token in the *global* batch."""
    total_rollouts: int
    """Rollouts of the *global* batch, those without such a token included."""
    loss_groups: int = 0
    """Groups, the completions of a prompt each, with at least one such token in the *global* batch."""
    group_tokens: Tensor | None = None
    """[T] tokens that train in the group of each token, in the *global* batch."""
    rollout_tokens: Tensor | None = None
    """[T] tokens that train in the rollout of each token, in the *global* batch; None if each sequence is a rollout."""
    advantages: Tensor | None = None
    """[T]."""
    behavior_logprobs: Tensor | None = None
    """[T] log-probability under the policy that sampled."""
    ref_logprobs: Tensor | None = None
    """[T] log-probability under the reference policy."""
    proximal_logprobs: Tensor | None = None
    """[T] log-probability under the policy when training on this batch began. None in the first update on a batch: that
    is the policy itself."""
    teacher_ids: Tensor | None = None
    """[T, K] candidates of the teacher, −1 where there are fewer."""
    teacher_logprobs: Tensor | None = None
    """[T, K]."""
    chosen: Mapping[object, Tensor] = field(default_factory=dict)
    """[T] true on the tokens that a `TokenChoice` of the loss chose among those of the *global* batch."""

    def advantage(self) -> Tensor:
        """Return [T] the advantage of each token.

        Raises:
            InvalidRecord: the batch lacks it.
        """
        remedy = "put an AdvantageNormalizer before the trainer, or train with Distillation alone"
        return _present(self.advantages, "advantages", remedy)

    def log_ratio(self, old: OldPolicy) -> Tensor:
        """Return [T] log π/π_old of each token.

        Raises:
            InvalidRecord: the batch lacks the behavior log-probabilities.
        """
        return self.logprobs - (self.proximal() if old == "proximal" else self.behavior())

    def ratio(self, old: OldPolicy) -> Tensor:
        """Return [T] π/π_old of each token, its logarithm clamped to ±20; for errors see `log_ratio`."""
        return clamped(self.log_ratio(old)).exp()

    def proximal(self) -> Tensor:
        """Return [T] log-probability under the policy when training on this batch began, without gradient."""
        return self.logprobs.detach() if self.proximal_logprobs is None else self.proximal_logprobs

    def behavior(self) -> Tensor:
        """Return [T] log-probability under the policy that sampled.

        Raises:
            InvalidRecord: the batch lacks it.
        """
        remedy = "have the sampler record them, or train with AdvantageWeighted, which needs none"
        return _present(self.behavior_logprobs, "behavior_logprobs", remedy)

    def tokens_of_group(self) -> Tensor:
        """Return [T] the number of tokens that train in the group of each token, in the global batch.

        Raises:
            InvalidRecord: it is unknown.
        """
        return _present(self.group_tokens, "group_tokens", "give it, as TorchTrainer does, or aggregate otherwise")

    def reference(self) -> Tensor:
        """Return [T] log-probability under the reference policy.

        Raises:
            InvalidRecord: neither the batch nor the trainer has it.
        """
        remedy = "give the TorchTrainer a `reference` model, or leave KL out of the loss"
        return _present(self.ref_logprobs, "ref_logprobs", remedy)

    def teacher(self) -> tuple[Tensor, Tensor]:
        """Return [T, K] the teacher's candidates, and their log-probabilities.

        Raises:
            InvalidRecord: the batch lacks them.
        """
        remedy = "put a Teacher before the Batcher, or leave distillation out of the loss"
        return (
            _present(self.teacher_ids, "teacher_ids", remedy),
            _present(self.teacher_logprobs, "teacher_logprobs", remedy),
        )

    def chosen_by(self, choice: object) -> Tensor:
        """Return [T] true on the tokens that `choice` chose.

        Raises:
            InvalidRecord: nothing chose.
        """
        return _present(self.chosen.get(choice), "chosen", "give the loss to a TorchTrainer, which chooses them")

    def token_mean(self, values: Tensor) -> Tensor:
        """Return [] this micro-batch's share of the mean of `values` [T] over all tokens of the global batch."""
        return values.sum() / max(1, self.loss_tokens)

    def sequence_sums(self, values: Tensor) -> Tensor:
        """Return [S] the sum of `values` [T] over each sequence."""
        sums: Tensor = torch.segment_reduce(
            values, "sum", lengths=self.lengths, unsafe=True
        )  # unsafe: also without sequences
        return sums

    def sequence_means(self, values: Tensor) -> Tensor:
        """Return [S] the mean of `values` [T] over each sequence; 0 where a sequence has no token that trains."""
        return self.sequence_sums(values) / self.lengths.clamp(min=1)

    def spread(self, values: Tensor) -> Tensor:
        """Return [T] the value of each token's sequence, of `values` [S]."""
        return values.repeat_interleave(self.lengths, output_size=len(self.logprobs))


def clamped(log_ratio: Tensor) -> Tensor:
    """Return `log_ratio` clamped to the bound for exponentiation."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _present(column: Tensor | None, name: str, remedy: str) -> Tensor:
    if column is None:
        raise InvalidRecord(f"{name}: expected a column, got none: {remedy}")
    return column
