"""`Mixture`: several sets of prompts by weight, as one.

Number i belongs to a set by its place in a block. There every set has a fixed number of places, spread evenly; so any
stretch of prompts has each set in about its share. Within a set, prompts are counted on their own: a small set begins
its next epoch while a large one is in its first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._pipeline.errors import InvalidConfig
from ..._schemas.numbers import finite_number
from ..._schemas.tokenizer import check_tokenizers
from ..contracts.prompts import Prompt
from .prompt_dataset import PromptDataset, PromptSet

MOST_PLACES = 1000
"""Places of a block, at most; weights are rounded to it."""

EXACT = 1e-9
"""Difference from a whole number that is due to rounding."""


@dataclass(frozen=True)
class Mixture:
    """Prompts of several sets, each by its weight; `make_env` of a source like a `PromptDataset`.

    >>> easy, hard = PromptDataset([{"prompt": "1+1="}], name="easy"), PromptDataset([{"prompt": "9*9="}], name="hard")
    >>> prompts = Mixture([easy, hard], weights=[3, 1])()
    >>> [prompts.prompt(number).meta["data_source"] for number in range(8)]
    ['easy', 'easy', 'hard', 'easy', 'easy', 'easy', 'hard', 'easy']

    Raises:
        InvalidConfig: no sets, another number of weights, a weight that is not above 0 or less than a thousandth of
            all, or two sets of one name.
        TokenizersDiffer: the chat formats of two sets have different tokenizers.
    """

    sets: Sequence[PromptDataset]
    """Each with its own order, split and bound."""
    weights: Sequence[float]
    """The share of each set, in any unit."""

    def __post_init__(self) -> None:
        """Check the fields."""
        if not self.sets or len(self.sets) != len(self.weights):
            raise InvalidConfig(
                f"Mixture.weights: expected one for each of at least one set, got {len(self.weights)} for "
                f"{len(self.sets)}"
            )
        taken = Counter(each.data_source for each in self.sets)
        if len(taken) < len(self.sets):
            raise InvalidConfig(f"Mixture.sets: expected names of their own, got {taken.most_common(1)[0][0]!r} twice")
        for index, weight in enumerate(self.weights):
            finite_number(f"Mixture.weights[{index}]", weight)
        if small := [each.data_source for each, places in zip(self.sets, self.places, strict=True) if not places]:
            raise InvalidConfig(f"Mixture.weights: expected at least a thousandth of all, got less for {small[0]!r}")
        check_tokenizers({each.data_source: each.tokenizer for each in self.sets if each.tokenizer is not None})

    @property
    def places(self) -> list[int]:
        """Return the number of places of each set in a block."""
        shares = np.array(self.weights, np.float64) / sum(self.weights)
        exact = (most for most in range(1, MOST_PLACES) if np.abs(shares * most - np.rint(shares * most)).max() < EXACT)
        ends = np.floor(np.cumsum(shares) * next(exact, MOST_PLACES) + 0.5)
        return [int(places) for places in np.diff(ends, prepend=0)]

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer of the first set with a chat format; None without one."""
        return next((each.tokenizer for each in self.sets if each.tokenizer is not None), None)

    def identity(self) -> dict[str, Any]:
        """Return the identity of the sets and of their places in a block.

        Raises the errors of `PromptDataset.identity`.
        """
        return {"kind": "mixture", "sets": [each.identity() for each in self.sets], "places": self.places}

    def __call__(self) -> MixedPrompts:
        """Open every set. Raises the errors of opening one."""
        return MixedPrompts([each() for each in self.sets], self.places)


class MixedPrompts:
    """The opened sets of a `Mixture`. Any thread may use it."""

    def __init__(self, sets: Sequence[PromptSet], places: Sequence[int]) -> None:
        self._sets = sets
        self._places = places
        middles = [((index + 0.5) / count, which) for which, count in enumerate(places) for index in range(count)]
        self._block = [which for _, which in sorted(middles)]
        """The set of each place."""
        self._before = [self._block[:place].count(which) for place, which in enumerate(self._block)]
        """The places of the same set before it in the block."""

    def __repr__(self) -> str:
        return f"<MixedPrompts: {', '.join(map(repr, self._sets))}>"

    def prompt(self, number: int) -> Prompt:
        """Return prompt `number`. Raises the errors of `PromptSet.prompt`."""
        block, place = divmod(number, len(self._block))
        which = self._block[place]
        return self._sets[which].prompt(block * self._places[which] + self._before[place])
