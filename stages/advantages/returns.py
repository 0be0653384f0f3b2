"""Returns and advantages of tokens: discounted sums over packed sequences, in float64, without loops over tokens.

Axes: B sequences lying one after another, N tokens in all, and M of these are *steps*: a reward may fall at a step, and
time passes between two. Steps form chains, each computed by itself. For a discount γ and a step t with the next step t'
of its chain:

    return     G(t) = r(t) + γ · G(t')
    error      δ(t) = r(t) + γ · V(t') − V(t)
    advantage  A(t) = δ(t) + γλ · A(t')        GAE, arXiv:1506.02438; behind the last step V and A are 0

A chain of T steps takes ⌈log₂ T⌉ passes over all steps (Hillis and Steele, "Data Parallel Algorithms", 1986): after
pass k every sum reaches 2ᵏ steps ahead. Sums are added in pairs, so errors do not grow with T where γ = 1, and where γ
is small its powers underflow to 0, as they should.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]
Places: TypeAlias = NDArray[np.int64]

Observations: TypeAlias = Literal["skipped", "severing", "blank", "valued", "counted"]
"""Treatment of a token that does not train (an observation, for example), between two that do or behind them.

skipped   no step: the tokens around it follow each other, as if it were not there
severing  no step, and sums of later tokens do not reach earlier ones
blank     a step that takes time, without reward or value of its own
valued    a step that takes time, without reward, and with the value that a critic gave it
counted   a step like any other
"""


class Steps(NamedTuple):
    """The steps of packed sequences."""

    places: Places
    """[M] index of the token of each step."""
    remaining: Places
    """[M] number of steps that follow in the same chain."""

    @classmethod
    def of(cls, loss_mask: Flags, lengths: Places, observations: Observations) -> Steps:
        """Return the steps of sequences of `lengths` [B] tokens. Those with a true `loss_mask` [N] train."""
        ends = lengths.cumsum()
        trained = np.flatnonzero(loss_mask)
        if observations in ("skipped", "severing"):
            bounds = np.searchsorted(trained, ends)
            if observations == "severing":
                turns = np.flatnonzero(np.diff(trained) > 1) + 1
                bounds = np.union1d(bounds, turns)
            return cls(trained, _remaining(np.diff(bounds, prepend=0)))
        firsts = np.append(trained, len(loss_mask))[np.searchsorted(trained, ends - lengths)]
        begun = np.arange(len(loss_mask)) >= firsts.repeat(lengths)
        return cls(np.flatnonzero(begun), _remaining(np.maximum(ends - firsts, 0)))


def last_places(flags: Flags, lengths: Places) -> Places:
    """Return [B] the last token of each sequence of `lengths` [B] tokens with `flags` [N] true; −1 if there is none."""
    ends = lengths.cumsum()
    places = np.flatnonzero(flags)
    if not len(places):
        return np.full(len(lengths), -1)
    last = places[np.searchsorted(places, ends) - 1]
    return np.where((ends - lengths <= last) & (last < ends), last, -1)


def earned_rewards(counted: Flags, lengths: Places, by_token: Floats | None, by_sequence: Floats | None) -> Floats:
    """Return [N] the reward of each token: `by_token` [N], and on the last counted token `by_sequence` [B].

    Args:
        counted: [N] true on the tokens that may earn a reward.
        lengths: [B] number of tokens of each sequence.
        by_token: None for none.
        by_sequence: None for none; that of a sequence without a counted token is left out.
    """
    earned = np.zeros(len(counted)) if by_token is None else np.where(counted, by_token, 0.0)
    if by_sequence is not None:
        last = last_places(counted, lengths)
        earned[last[last >= 0]] += by_sequence[last >= 0]
    return earned


def discounted_sums(values: Floats, discount: float, remaining: Places) -> Floats:
    """Return [M] Σ discountⁱ · value of the i-th step from here on, to the end of the chain."""
    sums, later = values.copy(), np.empty_like(values)  # one buffer for all passes: fresh memory costs more than sums
    ahead, power = 1, discount
    longest = int(remaining.max(initial=0))
    while ahead <= longest and power:
        reach = len(sums) - ahead
        np.multiply(sums[ahead:], power, out=later[:reach])
        np.add(sums[:reach], later[:reach], out=sums[:reach], where=remaining[:reach] >= ahead)
        ahead, power = 2 * ahead, power * power
    return sums


def generalized_advantages(rewards: Floats, values: Floats, discount: float, decay: float, remaining: Places) -> Floats:
    """Return [M] the advantage of each step, not whitened, from rewards [M] and values [M]; `decay` is λ."""
    following = np.append(values[1:], 0.0)
    following[remaining == 0] = 0.0
    return discounted_sums(rewards + discount * following - values, discount * decay, remaining)


def _remaining(counts: Places) -> Places:
    """Return [M] the number of steps that follow, in chains of `counts` steps."""
    remaining = counts.cumsum().repeat(counts)
    remaining -= np.arange(1, len(remaining) + 1)
    return remaining
