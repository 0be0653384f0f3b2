"""Distillation: the policy is trained towards the distribution of a teacher at every token.

A teacher returns its most probable candidates for a token, any number of them, in any order, with or without the token
itself. The rest of its distribution can be ignored, normalised away, or kept as one more candidate. The results are
three different numbers, chosen by `mode`:

    raw           Σ over the candidates, of probabilities as they are: their sum is at most 1. May be negative.
    renormalised  teacher and policy each divided by their sum over the candidates, however small that is.
    tail          the candidates, and one more for all other tokens: a divergence of distributions.

With all of the vocabulary as candidates they are equal. Tokens without candidates have value 0, and still count in the
denominator of a mean, as in every other term. The distributions of teacher and policy are taken at temperature 1.

Axes: T tokens that train, R of them that can be used, C of those in a chunk, K candidates, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..._pipeline.errors import InvalidConfig
from ..._schemas import InvalidRecord
from ..._schemas.choices import check_choice
from ..._schemas.numbers import number_or_nan
from .metrics import Metric, TokensUsed
from .policy import AdvantageWeighted, PolicyTerm
from .scored import Scored, clamped
from .terms import PerToken, Term

Divergence: TypeAlias = Literal["forward_kl", "reverse_kl", "jsd"]
"""KL(teacher ‖ policy), KL(policy ‖ teacher), or the generalised Jensen-Shannon divergence."""

Rest: TypeAlias = Literal["raw", "renormalised", "tail"]
"""The treatment of tokens that are no candidates: ignored, normalised away, or one candidate together."""

TOKENS_USED = "distill/tokens_used"
"""The metric: number of tokens of the batch with candidates that the loss could use."""

TEACHER_COLUMNS = ("teacher_ids", "teacher_logprobs")

LEAST_RENORMALISED = 3
"""Minimum width of columns that are renormalised: two candidates, and the token itself. A teacher with top_k=1 fills
columns of two, and one of them is padding wherever the token is the likeliest."""

LEAST_TAIL = torch.finfo(torch.float32).eps
"""Least probability of all other tokens: the resolution of a sum of float32 candidates."""


@dataclass(frozen=True, slots=True)
class Distillation(Term):
    """The divergence between the teacher P and the policy Q, token by token: Σ over candidates, according to `mode`.

        forward_kl  Σ P log P/Q                                       Q covers all that P makes possible
        reverse_kl  Σ Q log Q/P                                       Q concentrates where P is probable
        jsd         β KL(P ‖ M) + (1 − β) KL(Q ‖ M), M = β P + (1 − β) Q    bounded; β is `beta`

    Hinton et al., "Distilling the Knowledge in a Neural Network" (2015); jsd is the generalised Jensen-Shannon
    divergence of Agarwal et al., "On-Policy Distillation of Language Models" (2024): near β times forward_kl for β near
    0. With one candidate a token, use `SampledDistillation`.

    Raises:
        InvalidConfig: an unknown divergence or mode, or `beta` missing, without use or not between 0 and 1.
    """

    divergence: Divergence = "forward_kl"
    mode: Rest = "tail"
    beta: float | None = None

    name: ClassVar[str] = "distillation"

    def __post_init__(self) -> None:
        check_choice("divergence", self.divergence, Divergence)
        check_choice("mode", self.mode, Rest)
        if (self.divergence == "jsd") != (self.beta is not None):
            raise InvalidConfig(
                f"beta: expected with 'jsd' and only there, got {self.beta} with {self.divergence!r}: "
                f"forward_kl and reverse_kl are its limits"
            )
        if self.beta is not None and not 0 < number_or_nan(self.beta) < 1:
            raise InvalidConfig(f"beta: expected between 0 and 1, got {self.beta}: at the limits use a KL divergence")

    @property
    def needs_columns(self) -> tuple[str, ...]:
        """Return the columns of the teacher; see `Term`."""
        return TEACHER_COLUMNS

    def per_token(self, scored: Scored, /) -> PerToken:
        """Return the divergence of each token; see `Term`. `distill/tokens_used`: tokens with candidates.

        Raises:
            InvalidRecord: see `Term`; or there are too few candidates for `renormalised`.
        """
        ids, _ = scored.teacher()
        if self.mode == "renormalised" and ids.shape[1] < LEAST_RENORMALISED:
            raise InvalidRecord(
                f"teacher_ids: expected room for {LEAST_RENORMALISED} candidates a token or more, a teacher's top_k of "
                f"2 and the token itself, got {ids.shape[1]}: a single token, renormalised, has probability 1 "
                f'for teacher and policy alike, so that their divergence is always 0. Use mode="tail", '
                f"SampledDistillation, or a higher top_k; columns that do contain the two likeliest need a third of −1"
            )
        candidates = _Candidates.of(scored, least=2 if self.mode == "renormalised" else 1)
        used = scored.distributions.models_own()[candidates.rows]
        (costs,) = used.over([self._costs], candidates.ids, candidates.logprobs)
        return PerToken(
            costs.new_zeros(len(ids)).index_copy(0, candidates.rows, costs), _used(candidates.rows.numel(), costs)
        )

    def _costs(self, predicted: Tensor, /, *candidates: Tensor) -> Tensor:
        """Return [C] the divergence of each token of a chunk, of the policy's log-probabilities [C, V]."""
        ids, teacher = candidates
        return self._divergence(*_Chunk(ids, teacher.to(predicted.dtype), predicted).distributions(self.mode))

    def _divergence(self, teacher: Tensor, policy: Tensor) -> Tensor:
        """Return [C] the divergence of log-probabilities by candidate, and tail."""
        if self.beta is None:
            return _kl(teacher, policy) if self.divergence == "forward_kl" else _kl(policy, teacher)
        mixture = torch.logaddexp(teacher + math.log(self.beta), policy + math.log(1 - self.beta))
        return self.beta * _kl(teacher, mixture) + (1 - self.beta) * _kl(policy, mixture)


@dataclass(frozen=True, slots=True)
class SampledDistillation(PolicyTerm):
    """−A · log π(token), with A = log π_teacher(token) − log π(token); no gradient flows through A.

    The policy gradient of KL(policy ‖ teacher), on tokens that the policy sampled: of higher variance than
    `Distillation("reverse_kl")`, and the only choice if the teacher returns the sampled token alone. Tokens that are
    not among their candidates are not used. A is clamped to ±20. With stale samples, weight it
    (`* ImportanceWeight()`).

    That holds at temperature 1. At another one A uses the policy at 1, while tokens and log π are of the policy at that
    temperature: the gradient is not that of a divergence, but it is 0, like that of reverse KL, where the policy at
    temperature 1 equals its teacher.
    """

    name: ClassVar[str] = "distillation"

    @property
    def needs_columns(self) -> tuple[str, ...]:
        """Return the columns of the teacher; see `Term`."""
        return TEACHER_COLUMNS

    def uncorrected(self, scored: Scored, /) -> Tensor:
        """Return the log-ratio of the current policy; see `PolicyTerm`."""
        return AdvantageWeighted().uncorrected(scored)

    def per_token(self, scored: Scored, /) -> PerToken:
        """Return the value of each token; see `Term`. `distill/tokens_used`: tokens that are among their candidates."""
        ids, logprobs = scored.teacher()
        itself = (ids == scored.tokens[:, None]) & ~logprobs.isneginf()
        teacher = logprobs.masked_fill(~itself, 0).sum(-1)
        with torch.no_grad():
            policy = _models_own(scored)
            advantages = torch.where(itself.any(-1), clamped(teacher - policy), 0)
        values, _ = AdvantageWeighted().per_token(replace(scored, advantages=advantages))
        return PerToken(values, _used(itself.any(-1).sum().item(), values))


def _models_own(scored: Scored) -> Tensor:
    """Return [T] log-probability of each token itself under the policy at temperature 1, over the whole vocabulary."""
    if scored.distributions.is_models_own:
        return scored.logprobs.detach()
    return scored.distributions.models_own().logprobs_of(scored.tokens)


class _Candidates(NamedTuple):
    """The candidates of a teacher, for tokens with enough of them."""

    rows: Tensor
    """[R] index of each among the T tokens."""
    ids: Tensor
    """[R, K] int64; −1 on padding."""
    logprobs: Tensor
    """[R, K] log-probabilities of the teacher; −inf on padding."""

    @classmethod
    def of(cls, scored: Scored, least: int) -> _Candidates:
        """Return the tokens with `least` candidates or more; one of probability 0 does not count.

        Raises:
            InvalidRecord: a candidate is not in the policy's vocabulary.
        """
        ids, logprobs = scored.teacher()
        vocabulary = scored.distributions.vocabulary
        if ids.numel() and (highest := int(ids.max())) >= vocabulary:
            raise InvalidRecord(
                f"teacher_ids: expected ids below {vocabulary}, for which the policy has logits, got {highest}: "
                f"teacher and policy must share a vocabulary"
            )
        known = (ids >= 0) & ~logprobs.isneginf()
        rows = (known.sum(-1) >= least).nonzero().squeeze(-1)
        known = known[rows]
        return cls(rows, ids[rows].long().masked_fill(~known, -1), logprobs[rows].masked_fill(~known, -math.inf))


class _Chunk(NamedTuple):
    """Candidates of some tokens, and the policy's distributions there."""

    ids: Tensor
    """[C, K] int64; −1 on padding."""
    logprobs: Tensor
    """[C, K] log-probabilities of the teacher; −inf on padding."""
    predicted: Tensor
    """[C, V] log-probabilities of the policy."""

    def distributions(self, mode: Rest) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of the teacher, and of the policy, by candidate; −inf without a candidate."""
        teacher, policy = self.logprobs, self._mask(self.predicted.gather(-1, self.ids.clamp(min=0)))
        match mode:
            case "raw":
                return teacher, policy
            case "renormalised":
                return _normalised(teacher), self._mask(_normalised(policy))
            case "tail":
                return self._with_tail(teacher, policy)

    def _mask(self, values: Tensor) -> Tensor:
        return values.masked_fill(self.ids < 0, -math.inf)

    def _with_tail(self, teacher: Tensor, policy: Tensor) -> tuple[Tensor, Tensor]:
        """Return both with one more candidate for all other tokens, or −inf where the policy has no others.

        The policy's is summed over the vocabulary, not subtracted from 1: where it is small, that gradient is noise.
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
    """Return [C] Σ p log p/q of log-probabilities by candidate, over entries that are possible under p."""
    return (p.exp() * torch.where(p.isneginf(), 0, p - q)).sum(-1)


def _used(count: float, like: Tensor) -> dict[str, Metric]:
    hint = (
        "the distillation term would train no token. Check that the teacher responds "
        "(teacher/failed), its top_k, and that its candidates are at the tokens that they predict"
    )
    return {TOKENS_USED: TokensUsed(like.new_tensor(count), hint)}
