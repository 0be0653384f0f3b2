"""JSON as Atropos' server reads it: "7", 2.0 and true are whole numbers where one is expected, unknown fields are none.

What is sent as it should be is decoded straight into its struct. Only what does not fit is looked at more patiently, so
that the patience costs nothing where none is needed. Knows the types of the contract, and no field of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from ....schemas import InvalidRecord
from ....schemas.errors import UNREADABLE

__all__ = ["decode_request", "explained", "lenient", "plain"]

T = TypeVar("T")

_NOT_JSON = re.compile(rb"-?(?:NaN|Infinity)\b")
"""Numbers that Python's json writes and JSON does not have."""

_PLACE = re.compile(r"\(byte (\d+)\)")
_KEY = re.compile(rb'"(\w+)"\s*:')

_INTEGRAL = re.compile(r"\s*[+-]?\d+(?:_\d+)*(?:\.0+)?\s*", re.ASCII)


LARGEST_WHOLE = 2.0**63
"""Beyond, a float says no more which whole number is meant."""

_AS_IT_IS: dict[type[msgspec.inspect.Type], set[type]] = {
    msgspec.inspect.IntType: {int},
    msgspec.inspect.FloatType: {int, float},
}
"""What is a number already where one is wanted: most of every list."""


def decode_request(body: bytes, wanted: type[T]) -> T:
    """`body` as a `wanted`.

    Raises:
        InvalidRecord: it is not JSON, or does not fit; the message says where.
    """
    try:
        return msgspec.json.decode(body, type=wanted)
    except msgspec.ValidationError:
        return lenient(plain(body), wanted)
    except UNREADABLE as error:
        raise InvalidRecord(explained(body, error)) from None


def plain(body: bytes) -> Any:
    """`body` as dicts, lists, strings and numbers.

    Raises:
        InvalidRecord: it is not JSON.
    """
    try:
        return msgspec.json.decode(body)
    except UNREADABLE as error:
        raise InvalidRecord(explained(body, error)) from None


def lenient(values: Any, wanted: type[T]) -> T:
    """`values`, as JSON gives them, as a `wanted`, converted where nothing is lost.

    Raises:
        InvalidRecord: they do not fit; the message says where.
    """
    try:
        return msgspec.convert(_meant(values, msgspec.inspect.type_info(wanted)), wanted)
    except (msgspec.ValidationError, RecursionError) as error:
        raise InvalidRecord(f"body: {_lowered(str(error))}") from None


def _meant(value: Any, wanted: msgspec.inspect.Type) -> Any:
    """`value` with numbers where `wanted` has them, if it can be said which."""
    match wanted:
        case msgspec.inspect.IntType():
            value = _whole(value)
        case msgspec.inspect.FloatType():
            value = _number(value)
        case msgspec.inspect.ListType() if isinstance(value, list):
            if not _AS_IT_IS.get(type(wanted.item_type), set()).issuperset(map(type, value)):
                value = [_meant(item, wanted.item_type) for item in value]
        case msgspec.inspect.StructType() if isinstance(value, Mapping):
            types = {field.encode_name: field.type for field in wanted.fields}
            value = {name: _meant(item, types[name]) for name, item in value.items() if name in types}
        case msgspec.inspect.UnionType() if value is not None:
            kinds = [kind for kind in wanted.types if not isinstance(kind, msgspec.inspect.NoneType)]
            value = _meant(value, kinds[0]) if len(kinds) == 1 else value
    return value


def _whole(value: Any) -> Any:
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer() and abs(value) < LARGEST_WHOLE):
        return int(value)
    if isinstance(value, str) and _INTEGRAL.fullmatch(value):
        return int(value.partition(".")[0])
    return value


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        return float(value)
    try:
        number = float(value) if isinstance(value, str) and value.isascii() else math.nan
    except ValueError:
        return value
    return number if math.isfinite(number) else value


def explained(body: bytes, error: Exception) -> str:
    """What is wrong with a `body` that is not JSON, and where."""
    found = _PLACE.search(str(error))
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
