"""Messages and tools as OpenAI's chat has them, to the plain ones that templates are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from ..conversation_tree import KnownMessage
from .call_fields import MAX_MESSAGES
from .refusals import decoded

LONGEST_KNOWN = 2**16
"""Bytes of a message that is read once; longer ones are few."""


class TextPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A part of the content of a message."""

    text: str
    type: Literal["text"]
    cache_control: Any = None


class CalledFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The function of a call."""

    name: str
    arguments: str | dict[str, Any] = "{}"
    parsed_arguments: Any = None


class MessageCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A call of a tool, in a message of the assistant."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    annotations: Any = None
    audio: None = None
    function_call: None = None
    parsed: Any = None
    provider_specific_fields: Any = None

    def plain(self) -> dict[str, Any]:
        """Return the message as templates read it."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        plain: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content or "",
        }
        if self.role == "assistant":
            if self.tool_calls:
                plain["tool_calls"] = [
                    {
                        "type": "function",
                        "function": {"name": call.function.name, "arguments": call.function.arguments},
                        **({"id": call.id} if call.id else {}),
                    }
                    for call in self.tool_calls
                ]
            if thought := self.reasoning_content or self.reasoning:
                plain["reasoning_content"] = thought
        if self.name is not None:
            plain["name"] = self.name
        if self.tool_call_id is not None:
            plain["tool_call_id"] = self.tool_call_id
        return plain


Messages: TypeAlias = Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]


RawMessages: TypeAlias = Annotated[list[msgspec.Raw], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
"""Messages that are not read yet."""


class _Conversation(msgspec.Struct):
    messages: list[ChatMessage]


MESSAGE, CONVERSATION = msgspec.json.Decoder(ChatMessage), msgspec.json.Decoder(_Conversation)


def known_messages(known: dict[bytes, KnownMessage], messages: Sequence[msgspec.Raw]) -> list[KnownMessage]:
    """Return messages as templates read them. A client sends the `known` ones with every call: they are read once.

    Raises:
        RequestRefused: one is no message.
    """
    found = []
    for raw in map(bytes, messages):
        if (message := known.get(raw)) is None:
            try:
                message = KnownMessage(MESSAGE.decode(raw).plain())
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                decoded(CONVERSATION, msgspec.json.encode({"messages": messages}))  # raises with the place
                raise
            if len(raw) <= LONGEST_KNOWN:
                known[raw] = message
        found.append(message)
    return found


class FunctionTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the policy may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tool."""

    function: FunctionTool
    type: Literal["function"]
    cache_control: Any = None


def plain_tools(tools: Sequence[ChatTool] | None) -> list[dict[str, Any]] | None:
    """Return tools as templates read them; None without any."""
    return [function_tool(tool.function) for tool in tools] if tools else None


def function_tool(function: FunctionTool) -> dict[str, Any]:
    """Return a function as templates read it."""
    described: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        described["description"] = function.description
    if function.parameters is not None:
        described["parameters"] = function.parameters
    return {"type": "function", "function": described}
