"""Configuration: YAML or a mapping, validated strictly by msgspec into a frozen `Config`.

    reward: Expected `float`, got `str` - at `$.format_markers[1].reward`

Knows nothing about any stage; a stage brings its own `Config`.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints
from urllib.parse import urlsplit

import msgspec
import yaml

from .errors import InvalidConfig


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of configurations: a frozen value that rejects unknown keys.

    Subclass it with fields, and repeat `frozen=True` for the type checkers. A rule over values goes into
    `__post_init__`, which raises `ValueError("field: expected …, got …")`.
    """


C = TypeVar("C", bound=Config)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, extended to read `1e-3` as a number.

    In pure Python: deep nesting raises `RecursionError`, where the C loader, which `msgspec.yaml` prefers, crashes.
    """


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def load_config(schema: type[C], path: str | Path, *, root: str = "config") -> C:
    """Return the configuration in a YAML file; an empty file gives every field its default.

    Raises:
        InvalidConfig: the file is not YAML of plain values in UTF-8, or does not fit `schema`.
        OSError: the file cannot be read.
    """
    values = load_values(path, root=root)
    try:
        return parse_config(schema, values, root=root)
    except InvalidConfig as error:
        raise InvalidConfig(f"{error} (in {path})") from None


def load_values(path: str | Path, *, root: str = "config") -> dict[str, Any]:
    """Return the values in a YAML file; none for an empty file. Raises what `load_config` does."""
    try:
        values = parse_yaml(Path(path).read_text("utf-8"), root=root)
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"{root}: expected YAML of plain values in UTF-8, got {error} (in {path})") from None
    except InvalidConfig as error:
        raise InvalidConfig(f"{error} (in {path})") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise InvalidConfig(f"{root}: Expected `object`, got `{type(values).__name__}` (in {path})")
    return values


def parse_yaml(text: str, *, root: str = "config") -> Any:
    """Return the value that a YAML text holds.

    Raises:
        InvalidConfig: it is not YAML of plain values.
    """
    try:
        return yaml.load(text, _Loader)  # noqa: S506 (a SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a ValueError: no date
        raise InvalidConfig(f"{root}: expected YAML of plain values in UTF-8, got {error}") from None


def parse_config(schema: type[C], values: Mapping[str, Any], *, root: str = "config") -> C:
    """Return the configuration in a mapping; nothing is converted except whole numbers to float.

    Args:
        schema: the `Config` to return.
        values: plain values, as YAML or JSON would give them.
        root: the beginning of error messages.

    Raises:
        InvalidConfig: the values do not fit `schema`; the message has the path, the expected value and the actual one,
            and for an unknown key the nearest known one.
    """
    try:
        return msgspec.convert(values, schema)
    except (msgspec.ValidationError, RecursionError) as error:
        raise InvalidConfig(f"{root}: {error}{_nearest_key(schema, str(error))}") from None


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the public name in `known` that is nearest to `name`, as the end of an error message; empty if none is."""
    public = {each.lower(): each for each in known if not each.startswith("_")}
    close = difflib.get_close_matches(name.lower(), public, n=1)
    return f"; did you mean {public[close[0]]!r}?" if close else ""


_UNKNOWN_KEY = re.compile(r"Object contains unknown field `(?P<key>[^`]*)`( - at `\$(?P<path>[^`]*)`)?$")


def _nearest_key(schema: type[Config], message: str) -> str:
    """Return the nearest key for the unknown one that a message of msgspec names; empty for any other message."""
    found = _UNKNOWN_KEY.match(message)
    if found is None:
        return ""
    schemas: set[Any] = {schema}
    for key in re.findall(r"\.(\w+)", found["path"] or ""):
        schemas = {inner for each in schemas for inner in _schemas_within(get_type_hints(each).get(key))}
    return nearest(found["key"], sorted({field for each in schemas for field in each.__struct_fields__}))


def _schemas_within(annotation: Any) -> Iterator[type[Config]]:
    """Yield the configurations in a type, such as those of a union or of a tuple."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        yield annotation
    for inner in get_args(annotation):
        yield from _schemas_within(inner)


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
        ValueError: naming the field.
    """
    for name, value in values.items():
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{name}: expected a finite number, got {value}")
