"""Distillation: the policy learns to expect of every token what a teacher expects.

A teacher tells its most probable candidates for a token, as many as it likes, in any order, the token itself among
them or not. What of its distribution lies elsewhere can be passed over, made up for, or kept as one more candidate.
These are three different numbers, and `mode` says which:

    raw           Σ over the candidates, of probabilities as they are, which do not add up to 1. May be negative.
    renormalised  teacher and policy each divided by what they give to the candidates, however little that is.
    tail          the candidates, and one more that stands for all other tokens: a divergence of distributions.

With all of the vocabulary as candidates they are one. Tokens without candidates cost nothing, and still count in what a
mean divides by, as in every other term. The teacher is heard at temperature 1, and so is the policy then.

Axes: T tokens that train, R of them that can be used, K candidates, C candidates and the tail, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from ..._schemas import InvalidRecord
from .metrics import Metric, TokensUsed
from .policy import AdvantageWeighted, PolicyTerm
from .scored import Scored, clamped
from .terms import PerToken, Term

__all__ = ["TOKENS_USED", "Distillation", "Divergence", "Rest", "SampledDistillation"]

Divergence: TypeAlias = Literal["forward_kl", "reverse_kl", "jsd"]
"""KL(teacher ‖ policy), KL(policy ‖ teacher), or what lies between them."""

Rest: TypeAlias = Literal["raw", "renormalised", "tail"]
"""What becomes of the tokens that are no candidates: they are passed over, made up for, or one candidate together."""

TOKENS_USED = "distill/tokens_used"
"""The metric: how many tokens of the batch a teacher had something to say of that the loss could use."""

LEAST_RENORMALISED = 3
"""Candidates that columns have room for where they are renormalised: two, and the token itself. A column of two is what
a teacher of top_k=1 fills, and of those one is padding wherever the token is what the teacher expected."""

LEAST_TAIL = torch.finfo(torch.float32).eps
"""What a teacher gives to all other tokens at the least: its candidates come in float32, whose sum tells no less."""


@dataclass(frozen=True, slots=True)
class Distillation(Term):
    """The divergence between the teacher P and the policy Q, token by token: Σ over candidates, as `mode` has them.

        forward_kl  Σ P log P/Q                                       Q covers all that P holds possible
        reverse_kl  Σ Q log Q/P                                       Q keeps to what P holds probable
        jsd         β KL(P ‖ M) + (1 − β) KL(Q ‖ M), M = β P + (1 − β) Q    bounded; β is `beta`

    Hinton et al., "Distilling the Knowledge in a Neural Network" (2015); jsd is the generalised Jensen-Shannon
    divergence of Agarwal et al., "On-Policy Distillation of Language Models" (2024), which nears β times forward_kl as
    β nears 0. With one candidate a token, use `SampledDistillation`.

    Raises:
        ValueError: an unknown divergence or mode, or `beta` missing, without use or not between 0 and 1.
    """

    divergence: Divergence = "forward_kl"
    mode: Rest = "tail"
    beta: float | None = None

    name: ClassVar[str] = "distillation"

    def __post_init__(self) -> None:
        for name, allowed in (("divergence", get_args(Divergence)), ("mode", get_args(Rest))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if (self.divergence == "jsd") != (self.beta is not None):
            raise ValueError(
                f"beta: expected with 'jsd' and only there, got {self.beta} with {self.divergence!r}: "
                f"forward_kl and reverse_kl are what lies at its ends"
            )
        if self.beta is not None and not 0 < self.beta < 1:
            raise ValueError(f"beta: expected between 0 and 1, got {self.beta}: at its ends take a KL divergence")

    def per_token(self, scored: Scored, /) -> PerToken:
        """See `Term`. `distill/tokens_used`: tokens that have candidates.

        Raises:
            InvalidRecord: as `Term`, or nothing can be learned from so few candidates.
        """
        ids, _ = scored.teacher()
        if self.mode == "renormalised" and ids.shape[1] < LEAST_RENORMALISED:
            raise InvalidRecord(
                f"teacher_ids: expected room for {LEAST_RENORMALISED} candidates a token or more, a teacher's top_k of "
                f"2 and the token itself, got {ids.shape[1]}: a single likeliest token, renormalised, is certain for "
                f'teacher and policy alike, and their divergence 0 whatever they expect. Take mode="tail", '
                f"SampledDistillation, or a higher top_k; columns that do hold the two likeliest want a third of −1"
            )
        told = _Told.of(scored, least=2 if self.mode == "renormalised" else 1)
        costs = self._divergence(*told.distributions(self.mode))
        return PerToken(costs.new_zeros(len(ids)).index_copy(0, told.rows, costs), _used(told.rows.numel(), costs))

    def _divergence(self, teacher: Tensor, policy: Tensor) -> Tensor:
        """[R] of log-probabilities [R, C]."""
        if self.beta is None:
            return _kl(teacher, policy) if self.divergence == "forward_kl" else _kl(policy, teacher)
        mixture = torch.logaddexp(teacher + math.log(self.beta), policy + math.log(1 - self.beta))
        return self.beta * _kl(teacher, mixture) + (1 - self.beta) * _kl(policy, mixture)


@dataclass(frozen=True, slots=True)
class SampledDistillation(PolicyTerm):
    """−A · log π(token), with A = log π_teacher(token) − log π(token), through which no gradient flows.

    The policy gradient of KL(policy ‖ teacher), on tokens that the policy sampled: of higher variance than
    `Distillation("reverse_kl")`, and all that can be had where the teacher tells of the sampled token alone. Tokens
    that are not among their candidates are not used. A is clamped to ±20. Where samples are stale, weight it
    (`* ImportanceWeight()`).

    That holds at temperature 1. At another one A compares the policy as it is at 1, tokens are drawn from it as it is
    at that temperature, and log π is of the latter: the gradient is that of no divergence, though it is 0, as that of
    reverse KL is, where the policy at temperature 1 expects what its teacher does.
    """

    name: ClassVar[str] = "distillation"

    @property
    def corrects(self) -> bool:
        """See `PolicyTerm`."""
        return False

    def uncorrected(self, scored: Scored, /) -> Tensor:
        """See `PolicyTerm`: here it is the policy as it is now."""
        return AdvantageWeighted().uncorrected(scored)

    def per_token(self, scored: Scored, /) -> PerToken:
        """See `Term`. `distill/tokens_used`: tokens that are among their candidates."""
        ids, logprobs = scored.teacher()
        itself = (ids == scored.tokens[:, None]) & ~logprobs.isneginf()
        teacher = logprobs.masked_fill(~itself, 0).sum(-1)
        with torch.no_grad():
            policy = scored.untempered().gather(-1, scored.tokens[:, None]).squeeze(-1)
            advantages = torch.where(itself.any(-1), clamped(teacher - policy), 0)
        values, _ = AdvantageWeighted().per_token(replace(scored, advantages=advantages))
        return PerToken(values, _used(itself.any(-1).sum().item(), values))


class _Told(NamedTuple):
    """What a teacher said, of tokens of which it said enough."""

    rows: Tensor
    """[R] which of the T tokens they are."""
    known: Tensor
    """[R, K] true on candidates, false on padding."""
    ids: Tensor
    """[R, K] int64; −1 on padding."""
    logprobs: Tensor
    """[R, K] of the teacher; −inf on padding."""
    predicted: Tensor
    """[R, V] of the policy."""

    @classmethod
    def of(cls, scored: Scored, least: int) -> _Told:
        """Of the tokens that have `least` candidates or more. One that the teacher holds impossible is none.

        Raises:
            InvalidRecord: a candidate is not in the policy's vocabulary.
        """
        ids, logprobs = scored.teacher()
        vocabulary = scored.predicted.shape[1]
        if ids.numel() and (highest := int(ids.max())) >= vocabulary:
            raise InvalidRecord(
                f"teacher_ids: expected ids below {vocabulary}, of which the policy has logits, got {highest}: "
                f"teacher and policy have to share a vocabulary"
            )
        known = (ids >= 0) & ~logprobs.isneginf()
        rows = (known.sum(-1) >= least).nonzero().squeeze(-1)
        predicted = scored.untempered()
        known = known[rows]
        return cls(
            rows,
            known,
            ids[rows].long().masked_fill(~known, -1),
            logprobs[rows].to(predicted.dtype).masked_fill(~known, -math.inf),
            predicted if len(rows) == len(ids) else predicted[rows],
        )

    def distributions(self, mode: Rest) -> tuple[Tensor, Tensor]:
        """[R, C] log-probabilities of the teacher, and of the policy; −inf where there is no candidate."""
        teacher, policy = self.logprobs, self._bare(self.predicted.gather(-1, self.ids.clamp(min=0)))
        match mode:
            case "raw":
                return teacher, policy
            case "renormalised":
                return _normalised(teacher), self._bare(_normalised(policy))
            case "tail":
                return self._with_tail(teacher, policy)

    def _bare(self, values: Tensor) -> Tensor:
        return values.masked_fill(~self.known, -math.inf)

    def _with_tail(self, teacher: Tensor, policy: Tensor) -> tuple[Tensor, Tensor]:
        """With one candidate more, for all that are none; where the policy can say nothing else, without.

        The policy's is summed up over the vocabulary, not taken from 1: where it is small, its gradient would be noise.
        """
        rows, vocabulary = self.predicted.shape
        padding_first = torch.zeros(rows, 1 + vocabulary, dtype=torch.bool, device=self.ids.device)
        candidate = padding_first.scatter(-1, self.ids + 1, value=True)[:, 1:]
        whole = (candidate | self.predicted.isneginf()).all(-1)
        elsewhere = self.predicted.masked_fill(candidate, torch.finfo(self.predicted.dtype).min).logsumexp(-1)
        missing = (1 - teacher.exp().sum(-1)).clamp(min=LEAST_TAIL).log()
        return (
            torch.cat([teacher, missing.masked_fill(whole, -math.inf)[:, None]], -1),
            torch.cat([policy, elsewhere.masked_fill(whole, -math.inf)[:, None]], -1),
        )


def _normalised(logprobs: Tensor) -> Tensor:
    return logprobs - logprobs.logsumexp(-1, keepdim=True)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """[R] Σ p log p/q of log-probabilities [R, C]; what is impossible under p adds nothing."""
    return (p.exp() * torch.where(p.isneginf(), 0, p - q)).sum(-1)


def _used(count: float, like: Tensor) -> dict[str, Metric]:
    otherwise = (
        "with distillation in the loss, that would pass for training. Look at whether the teacher answers "
        "(teacher/failed), at its top_k, and at whether its candidates stand at the tokens that they tell of"
    )
    return {TOKENS_USED: TokensUsed(like.new_tensor(count), otherwise)}
