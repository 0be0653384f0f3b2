"""`CallRoute`: one form of request for completions, and `PlainRoute`, for requests that sample nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from .call_fields import CallFields
from .refusals import RequestRefused, openai_error
from .served_rollout import Answer, ServedRollout

R = TypeVar("R", bound=CallFields)
Q = TypeVar("Q")


@dataclass(frozen=True, slots=True)
class CallRoute(Generic[R]):
    """A form of requests for completions."""

    decoder: msgspec.json.Decoder[R]
    ask: Callable[[ServedRollout, R], Callable[[], Awaitable[Answer]]]
    """Checks a request; what it returns samples, or raises an error that `refusal_of` reads."""
    body: Callable[[ServedRollout, R, Answer], Any]
    """Returns the JSON of the answer."""
    events: Callable[[ServedRollout, R, Answer], Iterator[bytes]]
    """Returns the answer as server-sent events."""
    error: Callable[[RequestRefused], Any] = openai_error
    """Returns the JSON of a refusal."""


@dataclass(frozen=True, slots=True)
class PlainRoute(Generic[Q]):
    """A form of requests that sample nothing."""

    decoder: msgspec.json.Decoder[Q] | None
    """None for requests without a body."""
    body: Callable[[ServedRollout, Q], Awaitable[Any]]
    error: Callable[[RequestRefused], Any] = openai_error


def event(data: Any, name: str | None = None) -> bytes:
    """Return a server-sent event with JSON."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return b"%sdata: %s\n\n" % (head, msgspec.json.encode(data))


DONE = b"data: [DONE]\n\n"
"""Ends a stream of OpenAI."""
