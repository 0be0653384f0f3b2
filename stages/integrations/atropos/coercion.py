"""Decode JSON as Atropos' server does: "7", 7.0 and true are accepted as whole numbers, unknown fields are dropped.

A body that fits its type is decoded in one pass. Only one that does not is decoded a second time, value by value, so
that the coercion has no cost where none is needed. Knows the types of the contract, and no field of it.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from ...._schemas import InvalidRecord
from ...._schemas.errors import UNREADABLE

__all__ = ["decode"]

T = TypeVar("T")

_NOT_JSON = re.compile(rb"-?(?:NaN|Infinity)\b")
"""Numbers that Python's json writes and JSON does not have."""

_POSITION = re.compile(r"\(byte (\d+)\)")
_KEY = re.compile(rb'"(\w+)"\s*:')


def decode(body: bytes, wanted: type[T]) -> T:
    """Return `body` as a `wanted`.

    >>> decode(b'["7", 7.0, true]', list[int])
    [7, 7, 1]

    Raises:
        InvalidRecord: it is not JSON, or does not fit; the message names the place, what was expected and what came.
    """
    try:
        return msgspec.json.decode(body, type=wanted)
    except msgspec.ValidationError:
        return _coerce(body, wanted)
    except UNREADABLE as error:
        raise InvalidRecord(_explain(body, error)) from None


def _coerce(body: bytes, wanted: type[T]) -> T:
    try:
        return msgspec.convert(_coerce_value(msgspec.json.decode(body), msgspec.inspect.type_info(wanted)), wanted)
    except msgspec.ValidationError as error:
        raise InvalidRecord(f"body: {_lowered(str(error))}") from None
    except UNREADABLE as error:
        raise InvalidRecord(_explain(body, error)) from None


def _coerce_value(value: Any, wanted: msgspec.inspect.Type) -> Any:
    """Return `value` with numbers where `wanted` has them and the conversion is exact."""
    match wanted:
        case msgspec.inspect.IntType():
            value = _coerce_number(value, int)
        case msgspec.inspect.FloatType():
            value = _coerce_number(value, float)
        case msgspec.inspect.ListType(item_type=item) if isinstance(value, list):
            value = [_coerce_value(each, item) for each in value]
        case msgspec.inspect.StructType() if isinstance(value, dict):
            types = {field.encode_name: field.type for field in wanted.fields}
            value = {name: _coerce_value(each, types[name]) for name, each in value.items() if name in types}
        case msgspec.inspect.UnionType(types=types) if value is not None:
            kinds = [kind for kind in types if not isinstance(kind, msgspec.inspect.NoneType)]
            value = _coerce_value(value, kinds[0]) if len(kinds) == 1 else value
    return value


def _coerce_number(value: Any, wanted: type[int | float]) -> Any:
    if isinstance(value, bool):
        return wanted(value)
    if isinstance(value, str | float):
        with suppress(msgspec.ValidationError):
            number = msgspec.convert(value.strip() if isinstance(value, str) else value, wanted, strict=False)
            return number if math.isfinite(number) else value
    return value


def _explain(body: bytes, error: Exception) -> str:
    """Return the error message for a `body` that is not JSON, with the place."""
    found = _POSITION.search(str(error))
    if found is None:
        return f"body: expected JSON, got {len(body)} bytes that are none: {_lowered(str(error))}"
    at = int(found[1])
    if literal := _NOT_JSON.match(body, max(0, at - 1)) or _NOT_JSON.match(body, at):
        keys = _KEY.findall(body, 0, at)
        where = f"{keys[-1].decode()}: " if keys else ""
        return (
            f"{where}expected finite numbers, got {literal[0].decode()} at byte {literal.start()}: JSON has no such "
            f"number, and none can be trained on; have the environment drop the group, or send a number"
        )
    return f"body: expected JSON, got {body[max(0, at - 20) : at + 20]!r} around byte {at}: {error}"


def _lowered(message: str) -> str:
    return message[:1].lower() + message[1:]
