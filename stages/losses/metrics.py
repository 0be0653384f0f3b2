"""Metrics of a loss, in the form in which micro-batches and ranks can be put together: shares add up, extremes do not.

A mean of means is not the mean: what is a mean over the tokens that train travels as a share of the global one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from ..._schemas import InvalidRecord
from .scored import Scored

__all__ = ["EffectiveSamples", "Max", "Mean", "Metric", "Min", "TokensUsed", "check_used", "merge", "weights_metrics"]


class Metric(Protocol):
    """A part of a number."""

    def merged(self, other: Self, /) -> Self:
        """What this part and another come to."""
        ...

    def over(self, updates: int, /) -> Self:
        """This part where the number is one over so many updates on the same batch."""
        ...

    def value(self) -> float:
        """The number, of all parts merged. Waits for the device."""
        ...


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over the global batch."""

    share: Tensor
    """[] detached."""

    def merged(self, other: Mean, /) -> Mean:
        """See `Metric`."""
        return Mean(self.share + other.share)

    def over(self, updates: int, /) -> Mean:
        """See `Metric`."""
        return Mean(self.share / updates)

    def value(self) -> float:
        """See `Metric`."""
        return self.share.item()


@dataclass(frozen=True, slots=True)
class Max:
    """The largest of the global batch."""

    found: Tensor
    """[] detached."""

    def merged(self, other: Max, /) -> Max:
        """See `Metric`."""
        return Max(torch.maximum(self.found, other.found))

    def over(self, updates: int, /) -> Max:  # noqa: ARG002 (an extreme is one over any number of updates)
        """See `Metric`."""
        return self

    def value(self) -> float:
        """See `Metric`."""
        return self.found.item()


@dataclass(frozen=True, slots=True)
class Min:
    """The smallest of the global batch."""

    found: Tensor
    """[] detached."""

    def merged(self, other: Min, /) -> Min:
        """See `Metric`."""
        return Min(torch.minimum(self.found, other.found))

    def over(self, updates: int, /) -> Min:  # noqa: ARG002 (as above)
        """See `Metric`."""
        return self

    def value(self) -> float:
        """See `Metric`."""
        return self.found.item()


@dataclass(frozen=True, slots=True)
class EffectiveSamples:
    """(mean w)² / mean w²: the share of the tokens that a mean weighted by w rests upon, 1 where all weigh the same.

    Kong, "A note on importance sampling using standardized weights" (1992), divided by the number of samples.
    """

    mean: Mean
    mean_square: Mean

    def merged(self, other: EffectiveSamples, /) -> EffectiveSamples:
        """See `Metric`."""
        return EffectiveSamples(self.mean.merged(other.mean), self.mean_square.merged(other.mean_square))

    def over(self, updates: int, /) -> EffectiveSamples:
        """See `Metric`."""
        return EffectiveSamples(self.mean.over(updates), self.mean_square.over(updates))

    def value(self) -> float:
        """See `Metric`."""
        square = self.mean_square.value()
        return self.mean.value() ** 2 / square if square else 0.0


@dataclass(frozen=True, slots=True)
class TokensUsed:
    """How many tokens of the global batch a term could do something with. None is an error: see `check_used`."""

    count: Tensor
    """[] detached."""
    otherwise: str
    """What may be wrong where it is none."""

    def merged(self, other: TokensUsed, /) -> TokensUsed:
        """See `Metric`."""
        return TokensUsed(self.count + other.count, self.otherwise)

    def over(self, updates: int, /) -> TokensUsed:
        """See `Metric`."""
        return TokensUsed(self.count / updates, self.otherwise)

    def value(self) -> float:
        """See `Metric`."""
        return self.count.item()


def check_used(metrics: Mapping[str, Metric]) -> None:
    """Make sure that no term of the loss did nothing at all; to be called with the metrics of a whole batch.

    Raises:
        InvalidRecord: one did, which would otherwise look as if it had been trained.
    """
    for name, metric in metrics.items():
        if isinstance(metric, TokensUsed) and not metric.value():
            raise InvalidRecord(f"{name}: expected some of the tokens that train, got none: {metric.otherwise}")


def merge(into: dict[str, Metric], more: Mapping[str, Metric]) -> None:
    """Merge every metric of `more`, of another micro-batch or update, with that of its name."""
    for name, metric in more.items():
        into[name] = into[name].merged(metric) if name in into else metric


def weights_metrics(name: str, weights: Tensor, scored: Scored) -> dict[str, Metric]:
    """What there is to say of `weights` [T]: `<name>/{mean,max,min,effective_sample_size}`."""
    kept = weights.detach()
    mean = Mean(scored.token_mean(kept))
    said: dict[str, Metric] = {
        f"{name}/mean": mean,
        f"{name}/effective_sample_size": EffectiveSamples(mean, Mean(scored.token_mean(kept**2))),
    }
    if len(kept):  # of nothing there is no largest
        lowest, highest = kept.aminmax()
        said |= {f"{name}/max": Max(highest), f"{name}/min": Min(lowest)}
    return said
