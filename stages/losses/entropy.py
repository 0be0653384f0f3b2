"""Entropy of the policy, as a term of a loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .scored import Scored
from .terms import PerToken, Term


@dataclass(frozen=True, slots=True)
class Entropy(Term):
    """The entropy in nats of the distribution each token was drawn from, over the whole vocabulary.

    A loss is minimised, so a bonus is subtracted: `PPOClip() - 0.01 * Entropy()`.
    """

    name: ClassVar[str] = "entropy"

    def per_token(self, scored: Scored, /) -> PerToken:
        """Return the entropy at each token; see `Term`."""
        return PerToken(scored.entropy, {})
