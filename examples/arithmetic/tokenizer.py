"""Encode one token for each character: the digits, the signs, and a full stop that ends an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["TOKENIZER", "CharacterTokenizer"]

CHARACTERS = "0123456789+-=."


@dataclass(frozen=True, slots=True)
class CharacterTokenizer:
    """Token id i is the i-th of `CHARACTERS`.

    >>> TOKENIZER.encode("3+4-5=")
    [3, 10, 4, 11, 5, 12]
    """

    @property
    def eos_id(self) -> int:
        """Return the id of the full stop."""
        return CHARACTERS.index(".")

    @property
    def vocabulary(self) -> int:
        """Return the number of different tokens."""
        return len(CHARACTERS)

    def get_vocab(self) -> dict[str, int]:
        """Return every token with its id, which identifies this tokenizer."""
        return {character: index for index, character in enumerate(CHARACTERS)}

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`.

        Raises:
            ValueError: a character that is not in the vocabulary.
        """
        return [CHARACTERS.index(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""
        return "".join(CHARACTERS[token] for token in ids)


TOKENIZER = CharacterTokenizer()
"""The tokenizer of the demo."""
