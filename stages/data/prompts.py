"""Prompts without a score of their own: what a data set gives to `SourceEnv`.

A `PromptSource` returns the prompt of any number at any time. So the order is a function of the number alone, and a
resumed run, which skips the numbers that were trained, needs no other state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, and the facts about it that the reward reads."""

    content: str | Sequence[int]
    """Text, which the tokenizer of the source encodes, or token ids."""
    meta: Mapping[str, Any] = {}
    """Added to the `meta` of the group; values that JSON can hold."""
    max_tokens: int | None = None
    """Bound on its length: a longer prompt is dropped as rejected."""


@runtime_checkable
class PromptSource(Protocol):
    """Prompts whose completions are scored by a later stage; the environment gives each the reward 0."""

    def prompt(self, number: int, /) -> Prompt:
        """Return prompt `number`, from 0 on, without end. Equal numbers return equal prompts."""
        ...
