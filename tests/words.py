"""A tokenizer for tests: the text of a token is its number."""

from __future__ import annotations

from collections.abc import Sequence


class Words:
    """Names tokens by their numbers."""

    eos_id = 0

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))
