"""The end of a completion at a stop string: the text of its tokens is searched after each token. Knows no model."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..contracts.policies import Tokenizer

MARGIN = 8
"""Tokens decoded beyond the length of a stop string: the first may begin within a character."""


class StopStrings:
    """Searches the text of one completion for its stop strings, token by token."""

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]) -> None:
        """Begin with an empty completion; only its last tokens are kept, since each has a byte of text at least."""
        self._tokenizer = tokenizer
        self._strings = strings
        self._tokens: deque[int] = deque(maxlen=max(len(string.encode()) for string in strings) + MARGIN)

    def end_with(self, token: int) -> bool:
        """Add a token; return whether the text contains a stop string now."""
        self._tokens.append(token)
        text = self._tokenizer.decode(list(self._tokens))
        return any(string in text for string in self._strings)
