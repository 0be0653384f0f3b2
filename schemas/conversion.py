"""Convert plain values and JSON to types, in any thread.

msgspec prepares a type, and those within it, when it first converts to it. The process crashes where two threads do so
at once (seen with 0.22): a type is prepared here by one thread, before any converts to it. Decoders of a module are
made at its import, by one thread as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_preparing = threading.Lock()
_prepared: set[Any] = set()


def convert(value: Any, kind: type[T], *, strict: bool = True, dec_hook: Callable[[type, Any], Any] | None = None) -> T:
    """Return a plain value as a `kind`.

    >>> convert({"a": [1, 2]}, dict[str, tuple[int, ...]])
    {'a': (1, 2)}

    Raises:
        msgspec.ValidationError: it does not fit `kind`.
    """
    _prepare(kind)
    return msgspec.convert(value, kind, strict=strict, dec_hook=dec_hook)


def decode_json(encoded: bytes | str | memoryview, kind: type[T], *, strict: bool = True) -> T:
    """Return JSON as a `kind`.

    >>> decode_json(b"[1, 2]", tuple[int, int])
    (1, 2)

    Raises:
        msgspec.DecodeError: it is no JSON, or no `kind`.
    """
    _prepare(kind)
    return msgspec.json.decode(encoded, type=kind, strict=strict)


def _prepare(kind: Any) -> None:
    if kind not in _prepared:
        with _preparing:
            msgspec.json.Decoder(kind)
            _prepared.add(kind)
