"""Calls of tools in the text of a turn, by the format that a model writes: content, thoughts and calls apart.

A parser finds the calls of one format. Their names and arguments are checked here, for all formats alike: a malformed
call stays in the text and is counted. Knows no tokenizer; its text has the special tokens, such as `[TOOL_CALLS]`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]


class ParsedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a turn."""

    content: str
    """The text without thoughts and calls, and without the white space around what remains; the text of a turn that has
    neither is unchanged."""
    reasoning: str | None
    """The text between `<think>` and `</think>`, unchanged; None if the turn does not begin with thoughts."""
    calls: tuple[ToolCall, ...]
    malformed: int
    """Number of calls that could not be read; they are a part of `content`."""


class CallBlock(NamedTuple):
    """A part of a text that is meant to be a call, or a list of calls."""

    start: int
    end: int
    """The part is `text[start:end]`; of a malformed call, `start` alone counts."""
    value: Any
    """An object with `name`, and with `arguments` or `parameters`, or a list of these; None if it is no JSON."""


class ToolCallParser(Protocol):
    """Finds calls in the text of a turn."""

    def __call__(self, text: str, /) -> Iterable[CallBlock]:
        """Return the parts of `text` that are meant to be calls, in order; raise nothing."""
        ...


def parse_turn(
    text: str, parser: str | ToolCallParser, *, tools: Sequence[Mapping[str, Any]] | None = None
) -> ParsedTurn:
    """Return the content, the thoughts and the calls of a turn; any text is parsed, without an error.

    A call is malformed if it is no JSON, or has no name, or the name of no tool, or arguments that are no object.

    Args:
        text: the turn with its special tokens, and without the token that ends it, as `PretrainedTokenizer.decode`
            returns it. A decoder that skips special tokens removes the calls of Llama and Mistral.
        parser: a name in `TOOL_CALL_PARSERS`, or a function.
        tools: JSON schemas of the tools that may be called; None for any.
    """
    reasoning, said = _without_reasoning(text)
    names = None if tools is None else {tool.get("function", tool).get("name") for tool in tools}
    calls: list[ToolCall] = []
    kept: list[str] = []
    malformed = place = 0
    for block in (TOOL_CALL_PARSERS[parser] if isinstance(parser, str) else parser)(said):
        found = _calls_in(block.value, names)
        if found:
            kept.append(said[place : block.start])
            place = block.end
        malformed += not found
        calls += found
    content = "".join([*kept, said[place:]])
    unchanged = reasoning is None and not calls
    return ParsedTurn(
        content=content if unchanged else content.strip(), reasoning=reasoning, calls=tuple(calls), malformed=malformed
    )


def _without_reasoning(text: str) -> tuple[str | None, str]:
    """Return the thoughts at the beginning of a turn, and its rest.

    1. The prompt began the thoughts: the turn has only their end.
    2. The turn was cut in its thoughts: it has only their beginning.
    """
    before, end, rest = text.partition("</think>")
    blank, begin, reasoning = before.partition("<think>")
    if begin and not blank.strip():
        return reasoning, rest
    return (before, rest) if end and not begin else (None, text)


def _calls_in(value: Any, names: set[Any] | None) -> list[ToolCall]:
    """Return the calls that JSON describes; none if one of them is malformed."""
    calls = [_call(each, names) for each in (value if isinstance(value, list) else [value])]
    read = [call for call in calls if call is not None]
    return read if len(read) == len(calls) else []


def _call(value: Any, names: set[Any] | None) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(name=name, arguments=arguments) if names is None or name in names else None


# -- formats -----------------------------------------------------------------------------------------------------------

NAME = '"name"'
"""JSON without it is an answer, and no malformed call, unless a mark begins it."""

NAMED = re.compile(r"\s*([^\s{\[\]]+)(?:\[CALL_ID\][^\s\[]*)?(?:\[ARGS\])?(?=\s*\{)")
"""The name of a call before its arguments, as newer models of Mistral write it."""

SEPARATOR = re.compile(r"\s*;\s*(?=\{)")

WHITE = re.compile(r"\s*")

DECODER = json.JSONDecoder()

WINDOW = 1024
"""Characters."""

LONGEST_TOKEN = 16
"""More characters than `-Infinity`, or two halves of a character as escapes."""


def _enclosed(text: str, opening: str, closing: str) -> Iterator[CallBlock]:
    """Find JSON between two marks, which its strings may contain."""
    end_mark, place = re.compile(rf"\s*{re.escape(closing)}"), 0
    while (start := text.find(opening, place)) >= 0:
        place = start + len(opening)
        value, end = _json_at(text, place)
        closed = end_mark.match(text, end)
        if closed:
            place = closed.end()
        yield CallBlock(start, place, value if closed else None)


def _llama(text: str) -> Iterator[CallBlock]:
    """Find objects separated by `;` at the beginning of the turn, or after `<|python_tag|>`."""
    mark = "<|python_tag|>"
    start = text.find(mark)
    place = start + len(mark) if start >= 0 else 0
    if start < 0 and (NAME not in text or not text.lstrip().startswith("{")):
        return
    start = max(start, 0)
    while True:
        value, end = _json_at(text, place)
        yield CallBlock(start, end, value)
        following = SEPARATOR.match(text, end)
        if value is None or following is None:
            return
        start, place = end, following.end()


def _mistral(text: str) -> Iterator[CallBlock]:
    """Find a list after `[TOOL_CALLS]`, or a name and an object."""
    mark, place = "[TOOL_CALLS]", 0
    while (start := text.find(mark, place)) >= 0:
        place = start + len(mark)
        name = NAMED.match(text, place)
        value, end = _json_at(text, name.end() if name else place)
        if value is not None:
            place = end
        yield CallBlock(start, end, {"name": name[1], "arguments": value} if name else value)


def _plain(text: str) -> Iterator[CallBlock]:
    """Find a text that is JSON as a whole, or blocks of JSON in fences."""
    if NAME not in text:
        return
    if text.lstrip().startswith(("{", "[")):
        value, end = _json_at(text, 0)
        yield CallBlock(0, len(text), None if text[end:].strip() else value)
        return
    yield from _enclosed(text, "```json", "```")


TOOL_CALL_PARSERS: dict[str, ToolCallParser] = {
    "hermes": partial(_enclosed, opening="<tool_call>", closing="</tool_call>"),
    "mistral": _mistral,
    "llama": _llama,
    "json": _plain,
}
"""Parsers by name: `hermes` (Qwen's too), `mistral`, `llama`, and `json`, without a mark or in a fence. A parser of
your own is added here, or handed to `parse_turn`."""


def _json_at(text: str, place: int) -> tuple[Any, int]:
    """Return the object or the list in `text` at `place` and its end; None if there is none that UTF-8 can write again.

    A window of the text is decoded, and a longer one while the JSON goes on after it: an error counts the lines before
    it, so errors in the whole of a long text would take time by the square of its length.
    """
    start = WHITE.match(text, place)
    begin, length = start.end() if start else place, WINDOW
    if not text.startswith(("{", "["), begin):
        return None, place
    while True:
        window = text[begin : begin + length]
        try:
            value, end = DECODER.raw_decode(window)
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except json.JSONDecodeError as error:
            at_end = error.pos > length - LONGEST_TOKEN or error.msg.startswith("Unterminated string")
            if len(window) < length or not at_end:
                return None, place
            length *= 2
        except (ValueError, RecursionError):
            return None, place
        else:
            return value, begin + end
