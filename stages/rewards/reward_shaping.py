"""The configuration and the arithmetic of shaped rewards: pure functions of a raw score and of a completion's text.

    format_markers:                 # text that is rewarded
      - {marker: <think>, closing: </think>, reward: 0.1}
      - {marker: <answer>, closing: </answer>, reward: 0.1}
    ordered: true                   # only in the order listed
    length_bounty: {reward: 0.001, unit: token, cap: 0.2}
    overlong: {length: 4096, cache: 1024}
    combine: add                    # or fallback
    clip: [-1, 2]
    functions:
      - {function: "reward:accuracy", kind: trl, weight: 2.0}

The reward is the raw score plus the components, monotone in the raw score with every configuration. Every component
and every correction (`fallback`, `clip`) is a separate part, so that the parts always sum to the reward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Annotated, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..._pipeline.errors import InvalidConfig
from ..._schemas.config import Config, check_finite
from ..._schemas.noise import rounding

Floats: TypeAlias = NDArray[np.float64]

TURN_SEPARATOR = "\0"
"""Inserted between the turns of a conversation, so that no marker is found across the end of a turn."""

RIGHT_FROM = 1.0
"""Default of the least raw score of a right completion."""

Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]


class FormatMarker(Config, frozen=True):
    """Text that is rewarded if a completion contains it."""

    marker: Text
    """The text, for example `<answer>`."""
    reward: float
    """Reward of one occurrence; negative to discourage it."""
    counted: Literal["once", "each"] = "once"
    """True if only the first occurrence counts; else each does."""
    closing: Text | None = None
    """Text that must follow for an occurrence to count, for example `</answer>`. Each closing closes one marker."""

    def __post_init__(self) -> None:
        """Check the values."""
        check_finite(reward=self.reward)
        for name in ("marker", "closing"):
            if TURN_SEPARATOR in (getattr(self, name) or ""):
                raise InvalidConfig(f"{name}: expected text without the character NUL, got {getattr(self, name)!r}")


class LengthBounty(Config, frozen=True):
    """Reward or penalise the length of a completion."""

    reward: float
    """Reward of one unit; negative to penalise it."""
    cap: float
    """Largest magnitude of the sum for one completion."""
    unit: Literal["token", "character"] = "token"
    """The unit: tokens that train, or characters of the completion."""

    def __post_init__(self) -> None:
        """Check the values."""
        check_finite(reward=self.reward, cap=self.cap)
        if self.cap <= 0:
            raise InvalidConfig(f"cap: expected more than 0, got {self.cap}")


class OverlongPenalty(Config, frozen=True):
    """Penalise completions that come near the longest length: the soft overlong punishment of DAPO.

    Yu et al., "DAPO" (arXiv:2503.14476), equation 13: 0 up to `length` − `cache` tokens that train, from there
    linearly down to −`penalty` at `length`, and no further.
    """

    length: Annotated[int, msgspec.Meta(ge=1)]
    """Tokens of the longest completion; `max_completion_tokens` of the sampling, or less."""
    cache: Annotated[int, msgspec.Meta(ge=1)]
    """Tokens that the penalty grows over."""
    penalty: float = 1.0
    """Largest penalty."""

    def __post_init__(self) -> None:
        """Check the values."""
        check_finite(penalty=self.penalty)
        if self.cache > self.length:
            raise InvalidConfig(f"cache: expected at most length, {self.length}, got {self.cache}")
        if self.penalty <= 0:
            raise InvalidConfig(f"penalty: expected more than 0, got {self.penalty}")


class FunctionConfig(Config, frozen=True):
    """A function that is named, and its options; those that are absent keep their defaults."""

    function: Text
    """`module:name` of a function, or of a component such as a `RewardFunction`."""
    kind: Literal["trl", "verl", "completion"] | None = None
    """The arguments that a function takes: those of TRL (the default) or of verl, or a `RewardInput`."""
    name: Text | None = None
    """Of the part of the reward, and in metrics."""
    weight: float | None = None
    """Factor of the value in the reward; 1 by default."""
    concurrency: int | None = None
    """Bound on concurrent calls."""
    reward_timeout_s: float | None = None
    """Bound on the time of one call."""
    on_failure: Literal["drop", "raise"] | float | None = None
    """The rule for a completion without a value: see `RewardFunction`."""


class RewardConfig(Config, frozen=True):
    """The shaping of rewards by `RewardBridge`. By default, the reward is the raw score."""

    format_markers: tuple[FormatMarker, ...] = ()
    ordered: bool = False
    """True if markers count only in the order listed: an occurrence counts if it begins after the first counted one of
    every marker listed before it. A missing marker does not affect those after it."""
    length_bounty: LengthBounty | None = None
    overlong: OverlongPenalty | None = None
    combine: Literal["add", "fallback"] = "add"
    """add: the components are added to every raw score. fallback: only to those of failed completions, and never
    beyond `right_from`, so that no failed completion is ranked above a right one."""
    right_from: float | None = None
    """With fallback: the least raw score of a right completion; 1 by default."""
    clip: tuple[float, float] | None = None
    """Bounds on the reward."""
    functions: tuple[FunctionConfig, ...] = ()
    """Further components, in Python."""

    def __post_init__(self) -> None:
        """Check the values."""
        check_finite(right_from=self.right_from)
        if self.right_from is not None and self.combine != "fallback":
            raise InvalidConfig(f"right_from: expected only with combine: fallback, got {self.right_from}")
        if self.ordered and len(self.format_markers) < 2:  # noqa: PLR2004 (an order needs two)
            raise InvalidConfig(f"ordered: expected two markers or more, got {len(self.format_markers)}")
        if self.clip is not None:
            check_finite(clip=self.clip[0])
            check_finite(clip=self.clip[1])
            if self.clip[0] >= self.clip[1]:
                raise InvalidConfig(f"clip: expected [low, high] with low < high, got {list(self.clip)}")


def reward_of_format(turns: Sequence[str], config: RewardConfig) -> float:
    """Return the reward of the markers in `turns`, the texts of one completion."""
    text = TURN_SEPARATOR.join(turns)
    total, start = 0.0, 0
    for marker in config.format_markers:
        found = _occurrences(text, marker, start)
        ends = list(islice(found, 1) if marker.counted == "once" else found)
        total += marker.reward * len(ends)
        if config.ordered and ends:
            start = ends[0]
    return total


def _occurrences(text: str, marker: FormatMarker, start: int) -> Iterator[int]:
    """Yield the end of each occurrence of `marker` that counts, closing included."""
    while (found := text.find(marker.marker, start)) >= 0:
        start = found + len(marker.marker)
        if marker.closing is not None:
            closing = text.find(marker.closing, start)
            if closing < 0:
                return
            start = closing + len(marker.closing)
        yield start


def bounty_of_lengths(lengths: NDArray[np.int64], bounty: LengthBounty) -> Floats:
    """Return [S] the reward of completions of `lengths` [S] units."""
    return np.clip(lengths * np.float64(bounty.reward), -bounty.cap, bounty.cap).astype(np.float64)


def penalty_of_lengths(lengths: NDArray[np.int64], overlong: OverlongPenalty) -> Floats:
    """Return [S] the penalty, negative, of completions of `lengths` [S] tokens."""
    beyond = lengths - (overlong.length - overlong.cache)
    return -overlong.penalty * np.clip(beyond / overlong.cache, 0.0, 1.0)


def failed(scores: Floats, config: RewardConfig) -> NDArray[np.bool_]:
    """Return [S] true on completions that components apply to: all, or with fallback those that are not right."""
    if config.combine == "add":
        return np.ones(len(scores), np.bool_)
    return scores < right_from(config)


class Shaped(NamedTuple):
    """Rewards after shaping."""

    rewards: Floats
    """[S] exactly the bound where a bound applied."""
    noise: Floats
    """[S] bound on the rounding error of each."""
    parts: dict[str, Floats]
    """[S] each: the contribution of every component and correction."""


def combined(scores: Floats, noise: Floats, components: Mapping[str, Floats], config: RewardConfig) -> Shaped:
    """Add `components` ([S] each) to `scores` [S] with rounding `noise` [S], and correct the sum."""
    shaped, zeros = failed(scores, config), np.zeros(len(scores))
    parts = {name: np.where(shaped, component, 0.0) for name, component in components.items()}
    total = scores + sum(parts.values(), zeros)
    result = Shaped(total, noise + sum(map(rounding, parts.values()), zeros), parts)
    if config.combine == "fallback":
        highest = np.where(shaped, right_from(config), np.inf)
        result = _bounded(result, "fallback", np.minimum(total, highest))
    if config.clip is not None:
        result = _bounded(result, "clip", np.clip(result.rewards, *config.clip))
    return result


def _bounded(shaped: Shaped, name: str, bounded: Floats) -> Shaped:
    """Return `shaped` with rewards `bounded` [S] by the correction `name`; a bound has only rounding noise."""
    noise = np.where(bounded == shaped.rewards, shaped.noise, rounding(bounded))
    return Shaped(bounded, noise, shaped.parts | {name: bounded - shaped.rewards})


def right_from(config: RewardConfig | None) -> float:
    """Return the least score of a right completion."""
    return RIGHT_FROM if config is None or config.right_from is None else config.right_from
