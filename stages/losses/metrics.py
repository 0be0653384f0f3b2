"""Metrics of a loss, in a form that can be merged over micro-batches and ranks.

A mean of means is not the mean: a mean over the tokens that train is represented as its share of the global one, and
shares add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from ..._schemas import InvalidRecord
from .scored import Scored


class Metric(Protocol):
    """The part of a metric that comes from one micro-batch or rank."""

    def merged(self, other: Self, /) -> Self:
        """Return the merge of this part and `other`."""
        ...

    def over(self, updates: int, /) -> Self:
        """Return this part of a mean over so many updates on the same batch."""
        ...

    def value(self) -> float:
        """Return the metric, if this is the merge of all parts. Waits for the device."""
        ...


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over the global batch."""

    share: Tensor
    """[] without gradient."""

    def merged(self, other: Mean, /) -> Mean:
        """Merge; see `Metric`."""
        return Mean(self.share + other.share)

    def over(self, updates: int, /) -> Mean:
        """Divide by the number of updates; see `Metric`."""
        return Mean(self.share / updates)

    def value(self) -> float:
        """Return the number; see `Metric`."""
        return self.share.item()


@dataclass(frozen=True, slots=True)
class Extreme:
    """The largest or the smallest of the global batch."""

    found: Tensor
    """[] without gradient."""
    largest: bool

    def merged(self, other: Extreme, /) -> Extreme:
        """Merge; see `Metric`."""
        pick = torch.maximum if self.largest else torch.minimum
        return Extreme(pick(self.found, other.found), self.largest)

    def over(self, updates: int, /) -> Extreme:  # noqa: ARG002 (an extreme does not depend on it)
        """Return self; see `Metric`."""
        return self

    def value(self) -> float:
        """Return the number; see `Metric`."""
        return self.found.item()


@dataclass(frozen=True, slots=True)
class EffectiveSamples:
    """(mean w)² / mean w²: the share of the tokens that a mean weighted by w rests upon, 1 where all weigh the same.

    Kong, "A note on importance sampling using standardized weights" (1992), divided by the number of samples.
    """

    mean: Mean
    mean_square: Mean

    def merged(self, other: EffectiveSamples, /) -> EffectiveSamples:
        """Merge; see `Metric`."""
        return EffectiveSamples(self.mean.merged(other.mean), self.mean_square.merged(other.mean_square))

    def over(self, updates: int, /) -> EffectiveSamples:
        """Divide by the number of updates; see `Metric`."""
        return EffectiveSamples(self.mean.over(updates), self.mean_square.over(updates))

    def value(self) -> float:
        """Return the number; see `Metric`."""
        square = self.mean_square.value()
        return self.mean.value() ** 2 / square if square else 0.0


@dataclass(frozen=True, slots=True)
class TokensUsed:
    """The number of tokens of the global batch that a term used. 0 is an error: see `check_used`."""

    count: Tensor
    """[] without gradient."""
    hint: str
    """Possible causes of 0, for the error."""

    def merged(self, other: TokensUsed, /) -> TokensUsed:
        """Merge; see `Metric`."""
        return TokensUsed(self.count + other.count, self.hint)

    def over(self, updates: int, /) -> TokensUsed:
        """Divide by the number of updates; see `Metric`."""
        return TokensUsed(self.count / updates, self.hint)

    def value(self) -> float:
        """Return the number; see `Metric`."""
        return self.count.item()


def check_used(metrics: Mapping[str, Metric]) -> None:
    """Check that every term of the loss used some token; the metrics must be those of a whole batch.

    Raises:
        InvalidRecord: a term used no token.
    """
    for name, metric in metrics.items():
        if isinstance(metric, TokensUsed) and not metric.value():
            raise InvalidRecord(f"{name}: expected some of the tokens that train, got none: {metric.hint}")


def merge(into: dict[str, Metric], more: Mapping[str, Metric]) -> None:
    """Merge every metric of `more`, of another micro-batch or update, with the one of the same name."""
    for name, metric in more.items():
        into[name] = into[name].merged(metric) if name in into else metric


def weights_metrics(name: str, weights: Tensor, scored: Scored) -> dict[str, Metric]:
    """Return `<name>/{mean,max,min,effective_sample_size}` of `weights` [T]."""
    kept = weights.detach()
    mean = Mean(scored.token_mean(kept))
    metrics: dict[str, Metric] = {
        f"{name}/mean": mean,
        f"{name}/effective_sample_size": EffectiveSamples(mean, Mean(scored.token_mean(kept**2))),
    }
    if len(kept):  # an empty tensor has no extremes
        lowest, highest = kept.aminmax()
        metrics |= {f"{name}/max": Extreme(highest, largest=True), f"{name}/min": Extreme(lowest, largest=False)}
    return metrics
