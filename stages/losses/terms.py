"""Losses as sums of terms: `PPOClip() + 0.001 * KL("k3") - 0.01 * Entropy()`.

A term has a value for each token; `aggregated` makes one number of the sum, in the same way for all its terms. The
number is a share of the *global* batch's: losses and gradients of micro-batches and of ranks add up to those of the
whole (means of means do not).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from ..._pipeline.errors import InvalidConfig
from ..._schemas.choices import check_choice
from ..._schemas.numbers import normalize_counts
from .choices import TokenChoice
from .metrics import Mean, Metric
from .scored import Scored

Aggregation: TypeAlias = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean"
]
"""The aggregation of token values to one number, under the names of verl and ROLL: the mean over all tokens; the mean
over rollouts of their sums; of their means; of their sums divided by a constant. A rollout is mostly one sequence; its
branches count as one. SkyRL's prompt-mean is the mean over groups, the completions of a prompt each, of the means over
their tokens."""

Counted: TypeAlias = Literal["trained", "all"]
"""The rollouts in the denominator of a mean: those with a token that trains, or all."""


class PerToken(NamedTuple):
    """The values of a term for a micro-batch."""

    values: Tensor
    """[T] value of each token."""
    metrics: Mapping[str, Metric]
    """The same names for every micro-batch with tokens that train."""


class LossValue(NamedTuple):
    """The value of a loss for a micro-batch."""

    loss: Tensor
    """[] to be differentiated; adds up over micro-batches."""
    metrics: Mapping[str, Metric]


class Loss(Protocol):
    """A function that a trainer minimises."""

    def __call__(self, scored: Scored, /) -> LossValue:
        """Return the loss of one micro-batch, as a share of the global batch's.

        Raises:
            InvalidRecord: the batch lacks a column that this loss needs.
        """
        ...


class LossTerm(ABC):
    """A term or a sum of terms; it can be added and scaled. As a loss, it is the mean over all tokens."""

    __slots__ = ()

    @abstractmethod
    def parts(self) -> tuple[tuple[float, Term], ...]:
        """Return each term with its factor."""

    @property
    def needs_columns(self) -> tuple[str, ...]:
        """Return the columns that its terms need, besides those that every batch has."""
        return tuple(dict.fromkeys(name for _, term in self.parts() for name in term.needs_columns))

    @property
    def choices(self) -> tuple[TokenChoice, ...]:
        """Return the rules by which its terms choose among the tokens of the batch."""
        return tuple(dict.fromkeys(choice for _, term in self.parts() for choice in term.choices))

    def aggregated(
        self, aggregation: Aggregation, *, longest: int | None = None, counted: Counted = "trained"
    ) -> Aggregated:
        """Return this sum as a loss; `longest` and `counted` as in `Aggregated`."""
        return Aggregated(Sum(self.parts()), aggregation, longest, counted)

    def __call__(self, scored: Scored, /) -> LossValue:
        """Return the mean over all tokens; see `Loss`."""
        return self.aggregated("token-mean")(scored)

    def __add__(self, other: LossTerm) -> Sum:
        return Sum(self.parts() + other.parts())

    def __sub__(self, other: LossTerm) -> Sum:
        return self + -1 * other

    def __rmul__(self, factor: float) -> Sum:
        return Sum(tuple((factor * each, term) for each, term in self.parts()))


class Term(LossTerm):
    """A term of a loss, with a value for each token. To write one, define `per_token` and a `name`."""

    __slots__ = ()

    name: ClassVar[str]
    """Name of this term in the metrics of a loss of several: `loss/<name>`."""

    @property
    def needs_columns(self) -> tuple[str, ...]:
        """Return the columns that `per_token` needs; by default none, and a missing one ends the first step."""
        return ()

    @property
    def choices(self) -> tuple[TokenChoice, ...]:
        """Return the rules whose tokens `per_token` reads; by default none."""
        return ()

    @property
    def reported_as(self) -> str:
        """Return the name; for a wrapper, that of the wrapped term."""
        return self.name

    @abstractmethod
    def per_token(self, scored: Scored, /) -> PerToken:
        """Return the value of each token.

        Raises:
            InvalidRecord: the batch lacks a column that this term needs.
        """

    def parts(self) -> tuple[tuple[float, Term], ...]:
        """Return this term with factor 1; see `LossTerm`."""
        return ((1.0, self),)


@dataclass(frozen=True, slots=True, repr=False)
class Sum(LossTerm):
    """Terms, each with its factor."""

    terms: tuple[tuple[float, Term], ...]

    def __repr__(self) -> str:
        signed = "".join(f" {'-' if factor < 0 else '+'} {_scaled(abs(factor), term)}" for factor, term in self.terms)
        return signed.removeprefix(" + ").strip()

    def parts(self) -> tuple[tuple[float, Term], ...]:
        """Return each term with its factor; see `LossTerm`."""
        return self.terms


def _scaled(factor: float, term: Term) -> str:
    return repr(term) if factor == 1 else f"{factor:g} * {term!r}"


@dataclass(frozen=True, slots=True, repr=False)
class Aggregated:
    """A sum of terms as one number. A `Loss`.

    Args:
        total: the sum of terms.
        aggregation: see `Aggregation`.
        longest: the constant that `seq-mean-token-sum-norm` also divides by: the bound on the tokens of a completion.
            The longest completion of a micro-batch would differ from one micro-batch to the next.
        counted: the rollouts in the denominator of a mean: those with a token that trains, as in verl, or all, as in
            SkyRL and TRL, so that a batch with many masked rollouts makes a smaller step.

    Raises:
        InvalidConfig: an unknown aggregation or count, or `longest` or `counted` missing or without use.
    """

    total: Sum
    aggregation: Aggregation
    longest: int | None = None
    counted: Counted = "trained"

    def __post_init__(self) -> None:
        check_choice("counted", self.counted, Counted)
        if self.counted == "all" and self.aggregation in ("token-mean", "prompt-mean"):
            raise InvalidConfig(f"counted: expected 'all' with a mean over sequences, got it with {self.aggregation!r}")
        check_choice("aggregation", self.aggregation, Aggregation)
        if (self.aggregation == "seq-mean-token-sum-norm") != (self.longest is not None):
            raise InvalidConfig(
                f"longest: expected with 'seq-mean-token-sum-norm' and only there, got {self.longest} "
                f"with {self.aggregation!r}"
            )
        normalize_counts(self, "longest")

    def __repr__(self) -> str:
        longest = "" if self.longest is None else f", longest={self.longest}"
        counted = "" if self.counted == "trained" else f", counted={self.counted!r}"
        return f"({self.total!r}).aggregated({self.aggregation!r}{longest}{counted})"

    def __call__(self, scored: Scored, /) -> LossValue:
        """Return the loss; see `Loss`. With several terms, each is reported separately, without its factor.

        If two terms report a metric of the same name, the second reports it as `<name of the term>/<name>`.
        """
        shares = self._shares(scored)
        loss, metrics = scored.logprobs.new_zeros(()), dict[str, Metric]()
        for name, (factor, term) in zip(self._names(), self.total.terms, strict=True):
            values, reported = term.per_token(scored)
            share = (values * shares).sum()
            loss = loss + factor * share
            metrics |= {f"{name}/{each}" if each in metrics else each: metric for each, metric in reported.items()}
            if len(self.total.terms) > 1:
                metrics[f"loss/{name}"] = Mean(share.detach())
        return LossValue(loss, metrics)

    @property
    def needs_columns(self) -> tuple[str, ...]:
        """Return the columns that its terms need; see `LossTerm`."""
        return self.total.needs_columns

    @property
    def choices(self) -> tuple[TokenChoice, ...]:
        """Return the rules of its terms; see `LossTerm`."""
        return self.total.choices

    def _names(self) -> list[str]:
        """Return a unique name for each term: the second of a name is `<name>_2`."""
        names = [term.reported_as for _, term in self.total.terms]
        nth = [names[: place + 1].count(name) for place, name in enumerate(names)]
        return [name if n == 1 else f"{name}_{n}" for name, n in zip(names, nth, strict=True)]

    def _shares(self, scored: Scored) -> Tensor | float:
        """Return the factor of each token's value: [T], or one number for all."""
        if self.aggregation == "token-mean":
            return 1 / max(1, scored.loss_tokens)
        if self.aggregation == "prompt-mean":
            return 1 / (max(1, scored.loss_groups) * scored.tokens_of_group().to(scored.logprobs.dtype))
        one = 1 / max(1, scored.total_rollouts if self.counted == "all" else scored.loss_rollouts)
        if self.aggregation == "seq-mean-token-mean":
            if scored.rollout_tokens is not None:
                return one / scored.rollout_tokens.to(scored.logprobs.dtype)
            return scored.spread(one / scored.lengths.to(scored.logprobs.dtype))
        return one if self.longest is None else one / self.longest
