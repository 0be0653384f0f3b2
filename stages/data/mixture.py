"""`Mixture`: several sets of prompts by weight, as one.

Within a set, prompts are counted on their own: a small set begins its next epoch while a large one is in its first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..._pipeline.errors import InvalidConfig
from ..._schemas.tokenizer import check_tokenizers
from ..contracts.prompts import Prompt
from .prompt_dataset import ChatRow, PromptDataset, PromptSet
from .weighted_places import WeightedPlaces


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
        _ = self._places  # checks the weights
        check_tokenizers({each.data_source: each.tokenizer for each in self.sets if each.tokenizer is not None})

    @property
    def _places(self) -> WeightedPlaces:
        named = dict(zip((each.data_source for each in self.sets), self.weights, strict=True))
        return WeightedPlaces.of("Mixture.weights", named)

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer of the first set with a chat format; None without one."""
        return next((each.tokenizer for each in self.sets if each.tokenizer is not None), None)

    def identity(self) -> dict[str, Any]:
        """Return the identity of the sets and of their places in a block.

        Raises the errors of `PromptDataset.identity`.
        """
        return {"kind": "mixture", "sets": [each.identity() for each in self.sets], "places": self._places.counts}

    def __call__(self) -> MixedPrompts:
        """Open every set. Raises the errors of opening one."""
        return MixedPrompts([each() for each in self.sets], self._places)


class MixedPrompts:
    """The opened sets of a `Mixture`. Any thread may use it."""

    def __init__(self, sets: Sequence[PromptSet], places: WeightedPlaces) -> None:
        self._sets = sets
        self._places = places

    def __repr__(self) -> str:
        return f"<MixedPrompts: {', '.join(map(repr, self._sets))}>"

    def prompt(self, number: int) -> Prompt:
        """Return prompt `number`. Raises the errors of `PromptSet.prompt`."""
        which, own = self._places.at(number)
        return self._sets[which].prompt(own)

    def conversation(self, number: int) -> ChatRow:
        """Return the messages of row `number`. Raises the errors of `PromptSet.conversation`."""
        which, own = self._places.at(number)
        return self._sets[which].conversation(own)

    def row_of(self, number: int) -> dict[str, Any]:
        """Return the row of prompt `number`. Raises the errors of `PromptSet.row_of`."""
        which, own = self._places.at(number)
        return self._sets[which].row_of(own)

    def place_of(self, number: int) -> tuple[str, int]:
        """Return the name of the set of prompt `number`, and its place in it."""
        which, own = self._places.at(number)
        return self._sets[which].place_of(own)

    def rows_of(self, name: str) -> int:
        """Return the number of rows of the set of that name."""
        return next(len(each) for each in self._sets if each.place_of(0)[0] == name)
