"""Every field of every message between processes has its bounds, which decoding checks."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import inspect

from penstock import _pipeline, _schemas
from penstock._pipeline.workers.worker_messages import ProcessConfig
from penstock._schemas.bounds import Measure
from penstock._schemas.control import Message

FILES = {"written_samples._decode": "reads a file that this run has written"}
"""Decoders of something that no peer sends, with the reason."""

MEASURE = inspect.type_info(Measure)


def modules() -> Iterator[Any]:
    for package in (_schemas, _pipeline):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if "torch_" not in found.name:
                yield importlib.import_module(found.name)


def decoders() -> dict[str, Any]:
    """Return the type that each decoder of a module decodes to, by the names of both."""
    made = {}
    for module in modules():
        for name, value in vars(module).items():
            decoder = getattr(value, "__self__", value)
            if isinstance(decoder, msgspec.msgpack.Decoder | msgspec.json.Decoder):
                made[f"{module.__name__.rpartition('.')[2]}.{name}"] = decoder.type
    return {name: kind for name, kind in made.items() if name not in FILES}


def unbounded(kind: inspect.Type, path: str, within: tuple[inspect.Type, ...] = ()) -> Iterator[str]:
    """Yield the path of each part of a type that has no bounds."""
    if kind in within or kind == MEASURE or is_meta(kind):
        return
    if not is_bounded(kind):
        yield path
    for part, at in parts(kind, path):
        yield from unbounded(part, at, (*within, kind))


def is_meta(kind: inspect.Type) -> bool:
    """Return whether it is the `meta` of a record, which is any JSON; the message with it is bounded."""
    return isinstance(kind, inspect.DictType) and isinstance(kind.value_type, inspect.AnyType)


def is_bounded(kind: inspect.Type) -> bool:
    match kind:
        case inspect.IntType() | inspect.FloatType():
            return kind.ge is not None and kind.le is not None
        case inspect.StrType() | inspect.BytesType() | inspect.DictType() | inspect.CollectionType():
            return kind.max_length is not None
    return isinstance(kind, FINITE)


FINITE = (
    inspect.BoolType,
    inspect.NoneType,
    inspect.LiteralType,
    inspect.EnumType,
    inspect.Metadata,
    inspect.UnionType,
    inspect.TupleType,
    inspect.StructType,
    inspect.DataclassType,
    inspect.NamedTupleType,
)
"""Types that have no more values than their parts have."""


def parts(kind: inspect.Type, path: str) -> list[tuple[inspect.Type, str]]:
    """Return the parts of a type, each with its path."""
    found: list[tuple[inspect.Type, str]] = []
    match kind:
        case inspect.Metadata():
            found = [(kind.type, path)]
        case inspect.DictType():
            found = [(kind.key_type, f"{path} (key)"), (kind.value_type, f"{path} (value)")]
        case inspect.CollectionType():
            found = [(kind.item_type, f"{path}[]")]
        case inspect.TupleType():
            found = [(item, f"{path}[{place}]") for place, item in enumerate(kind.item_types)]
        case inspect.UnionType():
            found = [(part, path) for part in kind.types]
        case inspect.StructType() | inspect.DataclassType() | inspect.NamedTupleType():
            found = [(field.type, f"{kind.cls.__name__}.{field.name}") for field in kind.fields]
    return found


MESSAGES = {**decoders(), "Message": Message, "ProcessConfig": ProcessConfig}


def test_the_decoders_of_all_messages_are_found() -> None:
    expected = {"control._decode", "control._decode_of_sender", "worker_accounting._decode_report"}

    assert expected | {"worker_messages.decode_instruction", "layout._decode", "group._decode_header"} <= set(MESSAGES)


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_every_field_of_a_message_has_its_bounds(name: str) -> None:
    assert sorted(set(unbounded(inspect.type_info(MESSAGES[name]), name))) == []


class Inner(msgspec.Struct):
    """A message with bounds, but for the length of a list."""

    listed: list[Annotated[int, msgspec.Meta(ge=0, le=1)]] = []


@dataclass
class Other:
    """A message that has bounds at one end."""

    number: Annotated[int, msgspec.Meta(ge=0)] = 0
    measure: float = 0.0


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (int, ["it"]),
        (Annotated[str, msgspec.Meta(max_length=3)], []),
        (dict[str, int], ["it", "it (key)", "it (value)"]),
        (Inner | None, ["Inner.listed"]),
        (tuple[Other, bytes], ["Other.number", "Other.measure", "it[1]"]),
        (Any, ["it"]),
    ],
    ids=range(6),
)
def test_a_field_without_bounds_is_found(kind: Any, found: list[str]) -> None:
    assert list(unbounded(inspect.type_info(kind), "it")) == found
