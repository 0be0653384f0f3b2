"""What shapes a reward, and the arithmetic of it: pure functions of a raw score and of what the policy said.

    format_markers:                 # text that pays
      - {marker: <think>, closing: </think>, reward: 0.1}
      - {marker: <answer>, closing: </answer>, reward: 0.1}
    ordered: true                   # only in the order listed
    length_bounty: {reward: 0.001, unit: token, cap: 0.2}
    combine: add                    # or fallback
    clip: [-1, 2]

The reward is the raw score plus the components, monotone in the raw score whatever is configured. Every component and
every correction (`fallback`, `clip`) is a part of its own, so that the parts always sum to the reward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Annotated, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..._schemas.config import Config, check_finite
from ..._schemas.noise import rounding

__all__ = [
    "FormatMarker",
    "LengthBounty",
    "RewardConfig",
    "Shaped",
    "bounty_of_lengths",
    "combined",
    "failed",
    "reward_of_format",
]

Floats: TypeAlias = NDArray[np.float64]

TURN_SEAM = "\0"
"""Stands between the turns of a conversation, so that no marker is made of the end of one and the start of the next."""

RIGHT_FROM = 1.0
"""The raw score of a right answer, where the configuration does not say."""

Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]


class FormatMarker(Config, frozen=True):
    """Text that pays when the policy says it."""

    marker: Text
    """What is looked for, e.g. `<answer>`."""
    reward: float
    """What one occurrence pays; negative to discourage."""
    counted: Literal["once", "each"] = "once"
    """Whether only the first occurrence pays, or each."""
    closing: Text | None = None
    """Text that must follow for an occurrence to count, e.g. `</answer>`. Each closing closes one marker."""

    def __post_init__(self) -> None:
        """Hold the values to their rules."""
        check_finite(reward=self.reward)
        for name in ("marker", "closing"):
            if TURN_SEAM in (getattr(self, name) or ""):
                raise ValueError(f"{name}: expected text without the character NUL, got {getattr(self, name)!r}")


class LengthBounty(Config, frozen=True):
    """Pay, or charge, for the length of a completion."""

    reward: float
    """What one unit pays; negative to charge for it."""
    cap: float
    """The most that is paid or charged for one completion."""
    unit: Literal["token", "character"] = "token"
    """What is counted: tokens that train, or characters of the completion."""

    def __post_init__(self) -> None:
        """Hold the values to their rules."""
        check_finite(reward=self.reward, cap=self.cap)
        if self.cap <= 0:
            raise ValueError(f"cap: expected more than 0, got {self.cap}")


class RewardConfig(Config, frozen=True):
    """How `RewardBridge` shapes rewards. With everything left out, the reward is the raw score."""

    format_markers: tuple[FormatMarker, ...] = ()
    ordered: bool = False
    """Whether markers pay only in the order listed: an occurrence counts where it begins after the first counted one
    of every marker listed before it. A marker that is missing holds up none after it."""
    length_bounty: LengthBounty | None = None
    combine: Literal["add", "fallback"] = "add"
    """add: the components are added to every raw score. fallback: only to those of failed answers, and never beyond
    `right_from`, so that no failed answer is ranked above a right one."""
    right_from: float | None = None
    """With fallback: the raw score from which an answer is right; 1 unless said."""
    clip: tuple[float, float] | None = None
    """Bounds on the reward."""

    def __post_init__(self) -> None:
        """Hold the values to their rules."""
        check_finite(right_from=self.right_from)
        if self.right_from is not None and self.combine != "fallback":
            raise ValueError(f"right_from: expected only with combine: fallback, got {self.right_from}")
        if self.ordered and len(self.format_markers) < 2:  # noqa: PLR2004 (an order takes two)
            raise ValueError(f"ordered: expected two markers or more, got {len(self.format_markers)}")
        if self.clip is not None:
            check_finite(clip=self.clip[0])
            check_finite(clip=self.clip[1])
            if self.clip[0] >= self.clip[1]:
                raise ValueError(f"clip: expected [low, high] with low < high, got {list(self.clip)}")


def reward_of_format(turns: Sequence[str], config: RewardConfig) -> float:
    """What the markers in `turns`, the texts of one completion, pay."""
    text = TURN_SEAM.join(turns)
    total, start = 0.0, 0
    for marker in config.format_markers:
        found = _occurrences(text, marker, start)
        ends = list(islice(found, 1) if marker.counted == "once" else found)
        total += marker.reward * len(ends)
        if config.ordered and ends:
            start = ends[0]
    return total


def _occurrences(text: str, marker: FormatMarker, start: int) -> Iterator[int]:
    """Where each occurrence of `marker` that counts ends, closing included."""
    while (found := text.find(marker.marker, start)) >= 0:
        start = found + len(marker.marker)
        if marker.closing is not None:
            closing = text.find(marker.closing, start)
            if closing < 0:
                return
            start = closing + len(marker.closing)
        yield start


def bounty_of_lengths(lengths: NDArray[np.int64], bounty: LengthBounty) -> Floats:
    """[S] what completions of `lengths` [S] units are paid."""
    return np.clip(lengths * np.float64(bounty.reward), -bounty.cap, bounty.cap).astype(np.float64)


def failed(scores: Floats, config: RewardConfig) -> NDArray[np.bool_]:
    """[S] which answers the components apply to: all of them, or with fallback those that are not right."""
    if config.combine == "add":
        return np.ones(len(scores), np.bool_)
    return scores < _right_from(config)


class Shaped(NamedTuple):
    """What became of raw scores."""

    rewards: Floats
    """[S] where a bound decided, that bound exactly, however much was cut off."""
    noise: Floats
    """[S] how far rounding may have moved each of them."""
    parts: dict[str, Floats]
    """[S] each: what every component, and every correction, added."""


def combined(scores: Floats, noise: Floats, components: Mapping[str, Floats], config: RewardConfig) -> Shaped:
    """Add `components` ([S] each) to `scores` [S], which have that `noise` [S], and correct the sum."""
    shaped, nothing = failed(scores, config), np.zeros(len(scores))
    parts = {name: np.where(shaped, component, 0.0) for name, component in components.items()}
    total = scores + sum(parts.values(), nothing)
    result = Shaped(total, noise + sum(map(rounding, parts.values()), nothing), parts)
    if config.combine == "fallback":
        highest = np.where(shaped, _right_from(config), np.inf)
        result = _bounded(result, "fallback", np.minimum(total, highest))
    if config.clip is not None:
        result = _bounded(result, "clip", np.clip(result.rewards, *config.clip))
    return result


def _bounded(shaped: Shaped, name: str, bounded: Floats) -> Shaped:
    """`shaped` with rewards `bounded` [S] by the correction `name`: a bound has no noise but its own rounding."""
    noise = np.where(bounded == shaped.rewards, shaped.noise, rounding(bounded))
    return Shaped(bounded, noise, shaped.parts | {name: bounded - shaped.rewards})


def _right_from(config: RewardConfig) -> float:
    return RIGHT_FROM if config.right_from is None else config.right_from
