"""The tokens that begin a text: a model that was trained on texts after `<bos>` expects it before a prompt of text.

Chat templates write their own. Knows no model.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from ..contracts.policies import Tokenizer


@runtime_checkable
class HasStartTokens(Protocol):
    """A tokenizer that knows the tokens at the beginning of a text."""

    @property
    def start_ids(self) -> tuple[int, ...]:
        """Return the tokens that begin a text."""
        ...


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of `text` at the beginning of a sequence: after the tokens that begin one, once."""
    ids = list(tokenizer.encode(text))
    start = list(tokenizer.start_ids) if isinstance(tokenizer, HasStartTokens) else []
    return ids if ids[: len(start)] == start else [*start, *ids]
