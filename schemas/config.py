"""Configuration: from YAML or a dict to a frozen Struct, strictly. A mistake is told with the path of the value.

    reward.format_markers[1].reward: expected float, got str

YAML is read as plain data: mappings, lists, strings, numbers, true, false, null. Tags, anchors, duplicate keys and
several documents are refused, and so is a text longer than `MAX_CHARACTERS` or nested deeper than `MAX_DEPTH`, so that
a configuration from anywhere can execute nothing and exhaust nothing. Scalars follow YAML 1.2: `1e-3` is a number,
`no` and `12:30` are text. Knows nothing about any stage; a stage brings its own `Config`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import yaml

from .errors import InvalidConfig

__all__ = [
    "MAX_CHARACTERS",
    "MAX_DEPTH",
    "Config",
    "check_finite",
    "check_url",
    "load_config",
    "parse_config",
    "parse_yaml",
]

MAX_CHARACTERS = 65_536
"""The longest text that is read as YAML: more than anyone writes by hand, and parsed in about a second."""

MAX_DEPTH = 32
"""How deep a configuration may be nested."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a configuration is made of: a frozen value that refuses unknown keys.

    Subclass it with fields, and say `frozen=True` again for the type checkers' sake. A rule over values goes into
    `__post_init__`, which raises `ValueError("field: expected …, got …")`.
    """


C = TypeVar("C", bound=Config)


def load_config(schema: type[C], path: str | Path, *, root: str = "config") -> C:
    """The configuration in a YAML file; an empty file is one in which everything has its default.

    Raises:
        InvalidConfig: the file is not UTF-8, not plain YAML, or does not fit `schema`.
        OSError: the file cannot be read.
    """
    with Path(path).open("rb") as file:
        raw = file.read(4 * MAX_CHARACTERS + 1)  # UTF-8 takes at most 4 bytes a character
    try:
        return parse_yaml(schema, raw.decode(), root=root)
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"{root}: expected UTF-8 text, got {error.reason} (in {path})") from None
    except InvalidConfig as error:
        raise InvalidConfig(f"{error} (in {path})") from None


def parse_yaml(schema: type[C], text: str, *, root: str = "config") -> C:
    """The configuration in a YAML text.

    Raises:
        InvalidConfig: the text is not plain YAML, or does not fit `schema`.
    """
    values = _plain_data(text, root)
    return parse_config(schema, {} if values is None else values, root=root)


def parse_config(schema: type[C], values: Mapping[str, Any], *, root: str = "config") -> C:
    """The configuration in a mapping, strictly: nothing is converted but whole numbers to float.

    Args:
        schema: the `Config` that is wanted.
        values: what YAML or JSON would give.
        root: what paths in error messages begin with.

    Raises:
        InvalidConfig: the values do not fit `schema`; the message gives the path, what was expected and what came.
    """
    try:
        return msgspec.convert(values, schema, strict=True)
    except msgspec.ValidationError as error:
        raise InvalidConfig(_explain(str(error), schema, values, root)) from None
    except RecursionError:
        raise InvalidConfig(f"{root}: expected at most {MAX_DEPTH} levels, got far more") from None


def check_url(url: str, field: str) -> None:
    """Refuse what is no address of a server.

    Raises:
        InvalidConfig: naming the `field` that it is the value of.
    """
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.path.strip("/"):
        raise InvalidConfig(f"{field}: expected http://host:port without a path, got {url!r}")


def check_finite(**values: float | None) -> None:
    """For `__post_init__`: hold numbers to being finite (YAML can say `.nan` and `.inf`).

    Raises:
        ValueError: one of them is not.
    """
    for name, value in values.items():
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{name}: expected a finite number, got {value}")


# -- reading YAML ----------------------------------------------------------------------------------------------------


class _PlainLoader(yaml.SafeLoader):
    """SafeLoader without what configuration has no use for, and with the scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (declared so by yaml)

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise _refused(event, "expected no anchors and aliases, write the value out")
        if (tag := getattr(event, "tag", None)) is not None:
            raise _refused(event, f"expected plain data, got the tag {tag}")
        if self._depth >= MAX_DEPTH:
            raise _refused(event, f"expected at most {MAX_DEPTH} levels, got more")
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 (yaml's signature)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise _refused(key, f"expected each key once, got {key.value!r} again")
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_SCALARS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}


def _construct_decimal(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    del loader
    return int(node.value)  # yaml would take 010 for 8


for _name, (_pattern, _first) in _SCALARS.items():
    _PlainLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"^(?:{_pattern})$"), _first)
_PlainLoader.add_constructor("tag:yaml.org,2002:int", _construct_decimal)


def _refused(where: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=where.start_mark)


def _plain_data(text: str, root: str) -> Any:
    if len(text) > MAX_CHARACTERS:
        raise InvalidConfig(f"{root}: expected at most {MAX_CHARACTERS} characters, got {len(text)} or more")
    loader = None
    try:
        loader = _PlainLoader(text)
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise InvalidConfig(f"{root}: {where}{error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # control characters; a number of 5,000 digits
        raise InvalidConfig(f"{root}: expected plain YAML, got {error}") from None
    finally:
        if loader is not None:
            loader.dispose()


# -- telling what is wrong -------------------------------------------------------------------------------------------

_MESSAGE = re.compile(r"^(?P<problem>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>.*)`)?$", re.DOTALL)
_CLASS = re.compile(r"^[A-Z][A-Za-z]*\.")
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]|\[\.\.\.\]")


def _explain(message: str, schema: type[Config], values: Any, root: str) -> str:
    """The message of msgspec in our form: path, expected, got."""
    match = _MESSAGE.match(message)
    assert match is not None  # noqa: S101 (every part of the pattern is optional)
    problem, path = match["problem"], match["path"] or ""
    if match["key"]:
        problem = "Expected `str` for every key"
    steps = [field or (int(index) if index else None) for field, index in _STEP.findall(path)]
    fields, choices = _allowed(schema, steps)
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", problem):
        return f"{root}{path}: expected only the fields {', '.join(fields)}, got '{unknown[1]}'"
    if missing := re.fullmatch(r"Object missing required field `(.*)`", problem):
        return f"{root}{path}.{missing[1]}: expected a value, got none"
    if invalid := re.fullmatch(r"Invalid enum value (.*)", problem):
        return f"{root}{path}: expected one of {', '.join(map(repr, choices))}, got {invalid[1]}"
    if not problem.startswith("Expected"):  # from a __post_init__, which names the field, or class and field
        return f"{root}{path}.{_CLASS.sub('', problem)}"
    told = (
        problem.replace("`", "")
        .replace("Expected", "expected", 1)
        .replace("object", "mapping")
        .replace("| null", "or none")
    )
    got = "" if ", got " in told else f", got {_value(values, steps)!r}"
    return f"{root}{path}: {told.replace('array', 'list')}{got}"


def _value(values: Any, steps: list[str | int | None]) -> Any:
    for step in steps:
        values = None if step is None else values[step]
    return values


def _allowed(schema: type[Config], steps: list[str | int | None]) -> tuple[list[str], list[Any]]:
    """The names of fields, and the values, that are possible at the end of `steps`."""
    reached = [msgspec.inspect.type_info(schema)]
    for step in steps:
        reached = [inner for outer in reached for member in _members(outer) for inner in _inner(member, step)]
    members = [member for outer in reached for member in _members(outer)]
    structs = [member for member in members if isinstance(member, msgspec.inspect.StructType)]
    literals = [member for member in members if isinstance(member, msgspec.inspect.LiteralType)]
    return [f.encode_name for s in structs for f in s.fields], [value for found in literals for value in found.values]


def _members(outer: msgspec.inspect.Type) -> Iterator[msgspec.inspect.Type]:
    if isinstance(outer, msgspec.inspect.UnionType):
        yield from outer.types
    else:
        yield outer


def _inner(outer: msgspec.inspect.Type, step: str | int | None) -> Iterator[msgspec.inspect.Type]:
    if isinstance(outer, msgspec.inspect.StructType):
        yield from (field.type for field in outer.fields if field.encode_name == step)
    elif isinstance(outer, msgspec.inspect.TupleType) and isinstance(step, int):
        yield outer.item_types[step]
    elif isinstance(outer, msgspec.inspect.VarTupleType | msgspec.inspect.ListType):
        yield outer.item_type
    elif isinstance(outer, msgspec.inspect.DictType):
        yield outer.value_type
