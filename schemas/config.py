"""Configuration: YAML or a mapping, validated strictly by msgspec into a frozen `Config`.

    reward: Expected `float`, got `str` - at `$.format_markers[1].reward`

Independent of the stages: each brings its own `Config`.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

import msgspec

from .conversion import convert
from .errors import InvalidConfig
from .field_types import keys_in, names_in, paths_in, types_at


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of configurations: a frozen value that rejects unknown keys.

    Subclass it with fields, and repeat `frozen=True` for the type checkers. A rule over values goes into
    `__post_init__` and raises `InvalidConfig("field: expected …, got …")`.
    """

    other_names: ClassVar[Mapping[str, str]] = {}
    """Keys of other programs, with the last of their sections, by the keys that have their meaning here; and values, as
    `key=value`. A message about an unknown one names the key."""


C = TypeVar("C", bound=Config)


def load_config(schema: type[C], path: str | Path, *, root: str = "config") -> C:
    """Return the configuration in a YAML file; an empty file gives every field its default.

    Raises:
        InvalidConfig: the file is not YAML of plain values in UTF-8, or does not fit `schema`.
        OSError: the file cannot be read.
    """
    values = load_values(schema, path, root=root)
    try:
        return parse_config(schema, values, root=root)
    except InvalidConfig as error:
        raise InvalidConfig(f"{error} (in {path})") from None


def load_values(schema: type[Config], path: str | Path, *, root: str = "config") -> dict[str, Any]:
    """Return the values in a YAML file by the fields of `schema`; `{}` for an empty file. Raises as `load_config`."""
    from .yaml_values import parse_yaml  # noqa: PLC0415 (yaml takes 30 ms, and workers read no file)

    try:
        values = parse_yaml(Path(path).read_text("utf-8"), (schema,), root=root)
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"{root}: expected YAML of plain values in UTF-8, got {error} (in {path})") from None
    except InvalidConfig as error:
        raise InvalidConfig(f"{error} (in {path})") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise InvalidConfig(f"{root}: Expected `object`, got `{type(values).__name__}` (in {path})")
    return values


def parse_config(schema: type[C], values: Mapping[str, Any], *, root: str = "config") -> C:
    """Return the configuration in a mapping; whole numbers are converted to float, other values stay as they are.

    Args:
        schema: the `Config` to return.
        values: plain values, as YAML or JSON would give them.
        root: the beginning of error messages.

    Raises:
        InvalidConfig: the values do not fit `schema`; the message has the path, the expected value and the actual one,
            and for an unknown key or name the nearest known one.
    """
    try:
        return convert(values, schema)
    except (msgspec.ValidationError, RecursionError) as error:
        raise InvalidConfig(f"{root}: {_explained(schema, values, str(error))}") from None


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the public name in `known` that is nearest to `name`, as the end of an error message; empty if none is."""
    public = {each.lower(): each for each in known if not each.startswith("_")}
    close = difflib.get_close_matches(name.lower(), public, n=1)
    return f"; did you mean {public[close[0]]!r}?" if close else ""


PLACES = 3
"""Places of a key that a message names, at most."""

_MESSAGE = re.compile(r"(?P<what>.*?)(?P<at> - at `\$(?P<path>[^`]*)`)?", re.DOTALL)

_PLACES = re.compile(r"\.(\w+)|\[(\d+)\]")

_UNKNOWN_KEY = re.compile(r"Object contains unknown field `(?P<key>[^`]*)`")


def _explained(schema: type[Config], values: Any, message: str) -> str:
    """Return a message of msgspec, completed with the actual value, the known names and the nearest of them."""
    found = _MESSAGE.fullmatch(message)
    if found is None:
        return message
    what, at, path = found["what"], found["at"] or "", found["path"] or ""
    keys = [key or int(place) for key, place in _PLACES.findall(path)]
    types = types_at(schema, keys)
    if unknown := _UNKNOWN_KEY.fullmatch(what):
        key = unknown["key"]
        section = [each for each in keys if isinstance(each, str)]
        leaf = _first_leaf(_value_at(values, path).get(key))
        return message + (_counterpart(schema, [*section, key, *leaf]) or _elsewhere(schema, key, keys_in(types)))
    if ", got " in what or "[...]" in path:
        return message
    if what.startswith("Invalid enum value"):
        value, known = _value_at(values, path), names_in(types)
        advice = counterpart_of_value(schema, path.lstrip("."), value) or nearest(value, known)
        return f"Expected one of {', '.join(known)}, got {value!r}{at}{advice}"
    if what.startswith("Expected"):
        return f"{what}, got {_value_at(values, path)!r}{at}"
    return message


def counterpart_of_value(schema: type[Config], key: str, value: str) -> str:
    """Return the counterpart of another program's value of `key`, as the end of an error message; empty without one."""
    found = schema.other_names.get(f"{key}={value}")
    return f"; here it is {found}" if found else ""


def _counterpart(schema: type[Config], path: Sequence[str]) -> str:
    """Return the counterpart of another program's key, `path` or the end of it, as the end of an error message."""
    whole = [".".join(path[begin:end]) for end in range(len(path), 0, -1) for begin in range(end)]
    found = next((schema.other_names[each] for each in whole if each in schema.other_names), None)
    return f"; here it is {found}" if found else ""


def _elsewhere(schema: type[Config], key: str, beside: Iterable[str]) -> str:
    """Return the places of a key in other sections, or the nearest key in this one."""
    places = [place for place in paths_in((schema,)) if place.rpartition(".")[2] == key]
    return f"; did you mean {' or '.join(places)}?" if 0 < len(places) <= PLACES else nearest(key, beside)


def _first_leaf(value: Any) -> list[str]:
    """Return the keys that lead to the first value in mappings."""
    keys = []
    while isinstance(value, Mapping) and value:
        key, value = next(iter(value.items()))
        keys.append(str(key))
    return keys


def _value_at(values: Any, path: str) -> Any:
    for key, place in _PLACES.findall(path):
        values = values[key] if key else values[int(place)]
    return values


def check_url(url: str, field: str) -> None:
    """Raise an error if `url` is not the address of a server.

    Raises:
        InvalidConfig: naming the `field` that holds `url`.
    """
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.path.strip("/"):
        raise InvalidConfig(f"{field}: expected http://host:port without a path, got {url!r}")


def check_finite(**values: float | None) -> None:
    """Raise an error if a number is not finite (YAML has `.nan` and `.inf`). For `__post_init__`.

    Raises:
        InvalidConfig: naming the field.
    """
    for name, value in values.items():
        if value is not None and not math.isfinite(value):
            raise InvalidConfig(f"{name}: expected a finite number, got {value}")
