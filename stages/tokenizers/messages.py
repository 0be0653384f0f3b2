"""Messages as data sets, files and environments have them, in the one form that templates are given.

Arrow and `datasets` give each message, and each argument of a tool's call, the keys of all others, as null; content may
be a list of parts. Knows no template.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

from ..._pipeline.errors import InvalidData

Message: TypeAlias = Mapping[str, Any]
"""`{"role": "user", "content": "…"}`, with any other keys that the template reads."""


def are_messages(said: Any) -> bool:
    """Return whether `said` is a list of messages, each with keys for a role, and for content or calls of tools."""
    return isinstance(said, Sequence) and not isinstance(said, str) and len(said) > 0 and all(map(_is_message, said))


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and "role" in message and bool({"content", "tool_calls"} & message.keys())


def normalized(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages with text as content, without keys that are null, at any depth.

    Raises:
        InvalidData: a role or a part of the content is no text, or `tool_calls` is no list of calls; the message names
            it.
    """
    return [_normalized(number, message) for number, message in enumerate(messages)]


def asked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages of a prompt, normalized: turns of the assistant at the end are answers, and removed.

    Raises:
        InvalidData: a part of the content is no text, or only turns of the assistant are left.
    """
    prompt = normalized(messages)
    while prompt and prompt[-1]["role"] == "assistant":
        prompt.pop()
    if not prompt:
        raise InvalidData("expected messages that end with one of the user, got turns of the assistant alone")
    return prompt


def with_names(messages: Sequence[Message], earlier: Sequence[Message] = ()) -> list[Message]:
    """Return messages of which the results of tools have names: that of the call with their id, as OpenAI sends them.

    A call is searched in `earlier` messages too, from their end. A result without a call stays as it is.
    """
    out: list[Message] = []
    for message in messages:
        name = None
        if message["role"] == "tool" and "name" not in message and "tool_call_id" in message:
            name = _name_of(message["tool_call_id"], chain(reversed(out), reversed(earlier)))
        out.append(message if name is None else {**message, "name": name})
    return out


def _name_of(call_id: Any, messages: Iterable[Message]) -> Any:
    calls = (call for message in messages for call in message.get("tool_calls") or ())
    functions = (call.get("function") for call in calls if isinstance(call, Mapping) and call.get("id") == call_id)
    return next((function.get("name") for function in functions if isinstance(function, Mapping)), None)


def _normalized(number: int, message: Message) -> dict[str, Any]:
    found: dict[str, Any] = without_nulls(message)
    if not isinstance(found.get("role"), str):
        raise InvalidData(f"messages[{number}].role: expected text, got {found.get('role')!r}")
    if not isinstance(calls := found.get("tool_calls", []), list) or not all(
        isinstance(each, Mapping) for each in calls
    ):
        raise InvalidData(f"messages[{number}].tool_calls: expected a list of calls, got {calls!r:.80}")
    content = found.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        texts = [_text_of(part, f"messages[{number}].content[{index}]") for index, part in enumerate(content)]
        found["content"] = "".join(texts)
    elif not isinstance(content, str | None):
        raise InvalidData(
            f"messages[{number}].content: expected text or a list of parts that are text, got {content!r}"
        )
    return found


def _text_of(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type", part) if isinstance(part, Mapping) else part
    raise InvalidData(f'{place}: expected a part that is text, {{"type": "text", "text": "…"}}, got {kind!r}')


def without_nulls(value: Any) -> Any:
    """Return `value` without the keys of mappings that are null, at any depth."""
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(each) for each in value]
    return value
