"""Values from YAML, from arguments and from variables of the environment, by the types of their fields.

YAML gives a scalar without quotes a type by its looks: `010` is eight, `2026-01-02` a date, `yes` true. Here the field
decides: each of them is text in a field of text, and `010` is ten in one of a number. Text of an argument is not YAML
where the field is of text: `#`, `:` and brackets are a part of it.
"""

from __future__ import annotations

import re
from types import NoneType
from typing import Any

import yaml

from .errors import InvalidConfig
from .field_types import (
    Types,
    can_be_none,
    has_any_length,
    is_dict,
    is_list,
    is_struct,
    names_in,
    types_of_item,
    types_of_key,
)

PLAIN = "plain"
"""Tag of a scalar without quotes and without a tag of its own."""

TEXT, LIST, MAPPING, MERGE = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map", "merge"))

NULLS = {"", "~", "null", "Null", "NULL"}

SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}

_WHOLE = re.compile(r"[-+]?[0-9]+(_[0-9]+)*")

_BASED = re.compile(r"[-+]?0(x[0-9a-fA-F]+|o[0-7]+|b[01]+)")

_NUMBER = re.compile(r"[-+]?([0-9]+(_[0-9]+)*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")

_NOT_FINITE = re.compile(r"(?P<sign>[-+]?)\.(?P<word>inf|Inf|INF|nan|NaN|NAN)")

_QUOTED = re.compile(r"""\s*("([^"\\\n]|\\[^\n])*"|'([^'\n]|'')*')\s*""")
"""One text in quotes, as YAML has it on one line."""


def parse_yaml(text: str, types: Types = (Any,), *, root: str = "config") -> Any:
    """Return the value that a YAML text holds, its plain scalars as values of `types` and of the fields in them.

    Raises:
        InvalidConfig: it is not YAML of plain values, or gives a key twice.
    """
    try:
        loader = _Loader(text, root)
        node = loader.get_single_node()
        return None if node is None else loader.value(node, types)
    except InvalidConfig:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a ValueError: a number of too many digits
        raise InvalidConfig(f"{root}: expected YAML of plain values in UTF-8, got {_in_one_line(error)}") from None


def parse_argument(text: str, types: Types, *, root: str) -> Any:
    """Return the value that the text of an argument, or of a variable of the environment, is in a field of `types`.

    Text is taken as it is, or without quotes around all of it. A list or a mapping is YAML; a list of texts is in
    brackets, or is one text.

    Raises:
        InvalidConfig: it is no text in UTF-8, or a list or a mapping that is not YAML of plain values.
    """
    if "\0" in text or not _is_unicode(text):
        raise InvalidConfig(f"{root}: expected text in UTF-8 without NUL, got {text!r}")
    listed = str not in types and any(_is_list_of_text(each) for each in types)
    texts = (*types, str) if listed else types
    value = parse_yaml(text, texts, root=root) if _is_yaml(text, texts) else plain_value(text, texts)
    return [value] if listed and isinstance(value, str) else value


def plain_value(text: str, types: Types) -> Any:
    """Return the value of text without quotes in a field of `types`; that of its looks if it fits no other."""
    stripped = text.strip()
    if stripped in names_in(types):
        return stripped
    if str in types:
        return None if can_be_none(types) and stripped in NULLS else text
    if bool in types and stripped.lower() in SWITCHES:
        return SWITCHES[stripped.lower()]
    return _by_looks(stripped, text)


def _by_looks(stripped: str, text: str) -> Any:
    """Return null, a boolean, a number or else the text, as YAML 1.2 has them: dates are text, `010` is decimal."""
    if stripped in NULLS:
        return None
    if stripped.lower() in {"true", "false"}:
        return stripped.lower() == "true"
    number = _number(stripped)
    return text if number is None else number


def _number(text: str) -> int | float | None:
    if _WHOLE.fullmatch(text):
        return int(text)
    if _BASED.fullmatch(text):
        return int(text, 0)
    if _NUMBER.fullmatch(text):
        return float(text)
    found = _NOT_FINITE.fullmatch(text)
    return float(found["sign"] + found["word"]) if found else None


def _is_yaml(text: str, types: Types) -> bool:
    """Return whether the text of an argument is YAML: in quotes, or a list or a mapping where the field can be one."""
    if _QUOTED.fullmatch(text):
        return True
    if str in types or Any in types:
        nested = Any in types or any(map(is_list, types))
        return nested and (text.strip()[:1], text.strip()[-1:]) in {("[", "]"), ("{", "}")}
    return any(is_struct(each) or is_list(each) or is_dict(each) for each in types)


def _is_list_of_text(type_: Any) -> bool:
    return is_list(type_) and has_any_length(type_) and str in types_of_item((type_,), 0)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes of an argument that are not UTF-8
        return False
    return True


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader up to the nodes of a document; their values are made by type.

    In pure Python: deep nesting raises `RecursionError`, where the C loader crashes.
    """

    def __init__(self, text: str, root: str) -> None:
        super().__init__(text)
        self._root = root
        self._values: dict[tuple[int, Types], Any] = {}
        """Of each node by its types: aliases lead to one node many times."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping, and check that its keys are text and differ."""
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise InvalidConfig(f"{self._root}: expected text as a key, got a list or a mapping in line {line}")
            self._text(key)
            if key.value in lines:
                raise InvalidConfig(
                    f"{self._root}: expected each key once, got {key.value!r} in line {lines[key.value]} and in line "
                    f"{line}: remove one"
                )
            lines[key.value] = line
        return node

    def _text(self, node: yaml.ScalarNode) -> str:
        text: str = node.value
        if "\0" in text or not _is_unicode(text):  # by an escape within quotes
            raise InvalidConfig(
                f"{self._root}: expected text that UTF-8 can hold, without NUL, got {text!r} in line "
                f"{node.start_mark.line + 1}"
            )
        return text

    def value(self, node: yaml.Node, types: Types) -> Any:
        """Return the value of a node in a field of `types`."""
        place = (id(node), types)
        if place not in self._values:
            self._values[place] = self._made(node, types)
        return self._values[place]

    def _made(self, node: yaml.Node, types: Types) -> Any:
        if node.tag == PLAIN:
            return plain_value(node.value, (*types, NoneType))
        if node.tag == TEXT and isinstance(node, yaml.ScalarNode):
            return self._text(node)
        if node.tag == LIST and isinstance(node, yaml.SequenceNode):
            return [self.value(item, types_of_item(types, index)) for index, item in enumerate(node.value)]
        if node.tag == MAPPING and isinstance(node, yaml.MappingNode):
            self.flatten_mapping(node)  # keys of `<<` come first, so that those beside it replace them
            return {key.value: self.value(item, types_of_key(types, key.value)) for key, item in node.value}
        raise yaml.YAMLError(f"the tag {node.tag!r} in line {node.start_mark.line + 1}")


_Loader.yaml_implicit_resolvers = {"<": [(MERGE, re.compile("<<$"))], None: [(PLAIN, re.compile(""))]}


def _in_one_line(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} in line {mark.line + 1}, column {mark.column + 1}"
    return " ".join(str(error).split())
