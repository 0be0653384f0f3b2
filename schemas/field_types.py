"""The types that a value may have at a place of a `Config`. They decide how text is read, and what a message names.

Knows no format; `yaml_values` reads YAML and arguments by these types.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import msgspec

Types: TypeAlias = tuple[Any, ...]
"""The types of a place, those of a union one by one; empty where the schema has no such place."""


@cache
def alternatives(annotation: Any) -> Types:
    """Return the types that an annotation permits, without their constraints.

    >>> alternatives(Annotated[int, "at least 1"] | None)
    (<class 'int'>, <class 'NoneType'>)
    """
    if _origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    if _origin(annotation) in {Union, UnionType}:
        return tuple(each for inner in get_args(annotation) for each in alternatives(inner))
    return (annotation,)


def types_at(schema: type[msgspec.Struct], path: Iterable[str | int]) -> Types:
    """Return the types at `path`: names of keys, and numbers of places in lists."""
    types: Types = (schema,)
    for key in path:
        types = types_of_key(types, key) if isinstance(key, str) else types_of_item(types, key)
    return types


def types_of_key(types: Types, key: str) -> Types:
    """Return the types of the value of a key in a mapping of `types`."""
    found: Types = ()
    for each in types:
        if is_struct(each):
            hints = _hints(each)
            found += alternatives(hints[key]) if key in hints else ()
        elif each is Any:
            found += (Any,)
        elif is_dict(each):
            found += alternatives(get_args(each)[1])
    return found


def types_of_item(types: Types, index: int) -> Types:
    """Return the types of item `index` of a list of `types`."""
    found: Types = ()
    for each in types:
        items = get_args(each)
        if each is Any:
            found += (Any,)
        elif is_list(each):
            found += alternatives(items[0]) if has_any_length(each) else alternatives(items[min(index, len(items) - 1)])
    return found


def is_struct(type_: Any) -> bool:
    """Return whether a type is a struct with fields."""
    return isinstance(type_, type) and issubclass(type_, msgspec.Struct)


def is_dict(type_: Any) -> bool:
    """Return whether a type is a dictionary with types of its keys and values."""
    return _origin(type_) is dict


def is_list(type_: Any) -> bool:
    """Return whether a type is a list or a tuple with types of its items."""
    return _origin(type_) in {tuple, list}


def has_any_length(type_: Any) -> bool:
    """Return whether a list or tuple may have any number of items, all of one type."""
    return _origin(type_) is list or get_args(type_)[-1] is Ellipsis


def names_in(types: Types) -> list[str]:
    """Return the names that `types` permit."""
    return [name for each in types if _origin(each) is Literal for name in get_args(each)]


def keys_in(types: Types) -> list[str]:
    """Return the keys that a mapping of `types` may have, sorted."""
    return sorted({key for each in types if is_struct(each) for key in each.__struct_fields__})


def paths_in(types: Types) -> list[str]:
    """Return the paths of all keys in mappings of `types`, those of the items of a list with `[]`."""
    paths = []
    for each in types:
        if is_list(each):
            paths += [f"[].{path}" for path in paths_in(alternatives(get_args(each)[0]))]
        for key, annotation in _hints(each).items() if is_struct(each) else ():
            inner = (f"{key}{'' if path.startswith('[') else '.'}{path}" for path in paths_in(alternatives(annotation)))
            paths += [key, *inner]
    return paths


def can_be_none(types: Types) -> bool:
    """Return whether null is one of `types`."""
    return NoneType in types


def _origin(type_: Any) -> Any:
    return get_origin(type_)


@cache
def _hints(schema: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the annotations of the fields."""
    hints = get_type_hints(schema)
    return {name: hints[name] for name in schema.__struct_fields__}
