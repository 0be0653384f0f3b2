"""Prompts without a score of their own, from a data set to `SourceEnv`.

A `PromptSource` returns the prompt of any number at any time. So the order is a function of the number alone, and a
resumed run skips the numbers that were trained, without other state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from ..._pipeline.accounting.telemetry import get_logger
from ..._schemas.numbers import normalize_counts

log = get_logger("penstock.data")


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, and the facts about it that the reward reads."""

    content: str | Sequence[int]
    """Text for the tokenizer of the source to encode, or token ids."""
    meta: Mapping[str, Any] = {}
    """Added to the `meta` of the group; values that JSON can hold."""
    max_tokens: int | None = None
    """Bound on its length: a longer prompt is dropped as rejected."""
    left_out: str = ""
    """Why it is dropped as rejected now, whatever its length; empty if it is sampled."""

    def __post_init__(self) -> None:
        normalize_counts(self, "max_tokens")


@runtime_checkable
class PromptSource(Protocol):
    """Prompts whose completions are scored by a later stage; the environment gives each the reward 0."""

    def prompt(self, number: int, /) -> Prompt:
        """Return prompt `number`, from 0 on, without end. Equal numbers return equal prompts."""
        ...


@runtime_checkable
class Identified(Protocol):
    """Prompts that a continued run can compare with those that it began with."""

    def identity(self) -> dict[str, Any]:
        """Return the identity of the rows and of their order, as JSON values. Reads the rows; blocks."""
        ...


def identity_of(prompts: object) -> dict[str, Any] | None:
    """Return the identity of `prompts`; None if it has none, or if this host cannot read its rows. Blocks."""
    if not isinstance(prompts, Identified):
        return None
    try:
        return prompts.identity()
    except Exception as error:  # noqa: BLE001 (rows may be of any class, and on the hosts of the workers alone)
        log.warning("data_not_compared", data=repr(prompts), error=str(error))
        return None
