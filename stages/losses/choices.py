"""TokenChoice: a rule that chooses among the tokens of the whole batch, before the gradient of any is computed.

A covariance over all tokens, or a quantile, is not known within a micro-batch, nor on one rank. A trainer measures all
tokens in a pass without gradient, chooses once with the measurements of all ranks, and gives a loss the chosen ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..._pipeline.errors import InvalidConfig
from ..._schemas.numbers import number_or_nan
from .scored import Scored

Floats: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]


class TokenChoice(ABC):
    """A rule, equal to another of the same class and numbers; a term reads its tokens from `Scored.chosen_by`."""

    __slots__ = ()

    measurements: ClassVar[int]
    """M, the number of measurements of a token."""

    @abstractmethod
    def measured(self, scored: Scored, /) -> Tensor:
        """Return [T, M] measurements of the tokens of a micro-batch; called without gradient.

        Raises:
            InvalidRecord: the batch lacks a column that this rule needs.
        """

    @abstractmethod
    def choose(self, measured: Floats, /) -> Flags:
        """Return [N] true on the chosen ones of all tokens of the batch that train, from their measurements [N, M].

        Tokens are in an order that is random, the same in a repeated run, and independent of micro-batches and ranks.
        """


def number_of(share: float, tokens: int) -> int:
    """Return the number of tokens that a share of them is, as verl and SkyRL round it: down, and at least 1."""
    return max(int(share * tokens), 1)


def covariances(advantages: Floats, logprobs: Floats) -> Floats:
    """Return [N] (A − mean A) · (log π − mean log π) of each token: their mean is the covariance."""
    products: Floats = (advantages - advantages.mean()) * (logprobs - logprobs.mean())
    return products


def check_share(share: object) -> None:
    """Raise InvalidConfig if this is no share of the tokens of a batch."""
    if not 0 < number_or_nan(share) <= 1:
        raise InvalidConfig(f"share: expected a number above 0 and up to 1, got {share}")
