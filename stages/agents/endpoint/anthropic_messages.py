"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's messages, with tools and streams."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from http import HTTPStatus
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from .call_fields import MAX_MESSAGES, CallFields, Count, check_neutral, sampling_of
from .chat_messages import FunctionTool, function_tool
from .refusals import RequestRefused, anthropic_error, unsupported
from .route import CallRoute, PlainRoute, event
from .served_rollout import MODEL, Answer, Choice, ServedRollout


class Block(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """A part of a message."""

    cache_control: Any = None


class Text(Block, kw_only=True, tag="text"):
    """A text."""

    text: str
    citations: Any = None


class Thinking(Block, kw_only=True, tag="thinking"):
    """Thoughts, as they were returned."""

    thinking: str
    signature: Any = None


class ToolUse(Block, kw_only=True, tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None
    toolset_name: None = None


class ToolResult(Block, kw_only=True, tag="tool_result"):
    """The result of a call; an error is told by its text."""

    tool_use_id: str
    content: str | list[Text] | None = None
    is_error: bool | None = None
    toolset_name: None = None


class AnthropicMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A message of one role, whose parts are messages of their own for a template."""

    role: Literal["user", "assistant"]
    content: str | list[Text | Thinking | ToolUse | ToolResult]

    def plain(self) -> list[dict[str, Any]]:
        """Return the messages as templates read them."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        return self._of_assistant(self.content) if self.role == "assistant" else self._of_user(self.content)

    def _of_assistant(self, blocks: list[Any]) -> list[dict[str, Any]]:
        said: dict[str, Any] = {"role": "assistant", "content": ""}
        for block in blocks:
            match block:
                case Text():
                    said["content"] += block.text
                case Thinking():
                    said["reasoning_content"] = said.get("reasoning_content", "") + block.thinking
                case ToolUse():
                    function = {"name": block.name, "arguments": block.input}
                    said.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
                case _:
                    raise unsupported(
                        "messages", "expected tool_result in messages of the user, got one of the assistant"
                    )
        return [said]

    def _of_user(self, blocks: list[Any]) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        for block in blocks:
            match block:
                case Text() if messages and messages[-1]["role"] == "user":
                    messages[-1]["content"] += block.text
                case Text():
                    messages.append({"role": "user", "content": block.text})
                case ToolResult():
                    text = _text(block.content or "")
                    messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
                case _:
                    raise unsupported("messages", "expected calls and thoughts in messages of the assistant alone")
        return messages or [{"role": "user", "content": ""}]


def _text(content: str | list[Text]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class AnthropicTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: Any = None


AnthropicMessages: TypeAlias = Annotated[list[AnthropicMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]


class CountRequest(CallFields, kw_only=True):
    """A conversation whose tokens are counted."""

    messages: AnthropicMessages
    system: str | list[Text] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: Any = None
    thinking: Any = None

    @property
    def plain_messages(self) -> list[dict[str, Any]]:
        """Return the messages as templates read them, the system's first."""
        first = [] if self.system is None else [{"role": "system", "content": _text(self.system)}]
        return first + [plain for message in self.messages for plain in message.plain()]

    @property
    def plain_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools as templates read them; None without any."""
        return [
            function_tool(FunctionTool(name=tool.name, description=tool.description, parameters=tool.input_schema))
            for tool in self.tools or ()
        ] or None


class MessagesRequest(CountRequest, kw_only=True):
    """A request for a message of the assistant."""

    max_tokens: Count
    stop_sequences: Annotated[list[str], msgspec.Meta(max_length=64)] | None = None
    thread: Any = None

    @property
    def stop(self) -> list[str] | None:
        """Return the stop strings, by the name of other APIs."""
        return self.stop_sequences


TOOL_CHOICES: tuple[Any, ...] = (
    None,
    *({"type": kind} for kind in ("auto", "none")),
    *({"type": "auto", "disable_parallel_tool_use": off} for off in (False, None)),
)


def _ask(rollout: ServedRollout, request: MessagesRequest) -> Callable[[], Awaitable[Answer]]:
    check_neutral(request)
    if request.thread is not None:  # by this code, Anthropic's client goes on without one
        raise RequestRefused(
            HTTPStatus.BAD_REQUEST,
            "thread: expected none: each request has the whole conversation",
            code="thread_unsupported_request",
            field="thread",
        )
    choice = request.tool_choice
    if choice not in TOOL_CHOICES:
        raise unsupported("tool_choice", f"expected auto or none: a policy cannot be forced, got {choice!r:.80}")
    sampling = sampling_of(request, rollout.sampling, max_tokens=request.max_tokens)
    messages, tools = request.plain_messages, request.plain_tools
    return lambda: rollout.converse(messages, tools, sampling, callable_tools=choice != {"type": "none"})


async def _count(rollout: ServedRollout, request: CountRequest) -> dict[str, int]:
    return {"input_tokens": len((await rollout.prompt(request.plain_messages, request.plain_tools)).tokens)}


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if choice.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
    if choice.content:
        blocks.append({"type": "text", "text": choice.content})
    calls = [{"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in choice.calls]
    return blocks + calls


def _end(choice: Choice) -> dict[str, Any]:
    reasons = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
    stopped = choice.finish == "stop" and choice.stop is not None
    return {
        "stop_reason": "stop_sequence" if stopped else reasons[choice.finish],
        "stop_sequence": choice.stop if stopped else None,
    }


def _body(_: ServedRollout, request: MessagesRequest, answer: Answer) -> dict[str, Any]:
    (choice,) = answer.choices
    return {
        "id": answer.id,
        "type": "message",
        "role": "assistant",
        "model": request.model or MODEL,
        "content": _blocks(choice),
        **_end(choice),
        "usage": {"input_tokens": len(answer.prompt), "output_tokens": answer.sampled_tokens},
    }


BLANK: dict[str, dict[str, Any]] = {
    "thinking": {"thinking": "", "signature": ""},
    "text": {"text": ""},
    "tool_use": {"input": {}},
}
"""The fields of a block that its deltas fill in."""


def _delta(block: dict[str, Any]) -> dict[str, Any]:
    if block["type"] == "tool_use":
        return {"type": "input_json_delta", "partial_json": msgspec.json.encode(block["input"]).decode()}
    return {"type": f"{block['type']}_delta", block["type"]: block[block["type"]]}


def _events(rollout: ServedRollout, request: MessagesRequest, answer: Answer) -> Iterator[bytes]:
    def named(kind: str, **fields: Any) -> bytes:
        return event({"type": kind, **fields}, kind)

    whole = _body(rollout, request, answer)
    usage = whole["usage"]
    begun = whole | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage | {"output_tokens": 0}}
    yield named("message_start", message=begun)
    for index, block in enumerate(whole["content"]):
        yield named("content_block_start", index=index, content_block=block | BLANK[block["type"]])
        yield named("content_block_delta", index=index, delta=_delta(block))
        yield named("content_block_stop", index=index)
    yield named("message_delta", delta=_end(answer.choices[0]), usage={"output_tokens": usage["output_tokens"]})
    yield named("message_stop")


ANTHROPIC_MESSAGES: CallRoute[MessagesRequest] = CallRoute(
    msgspec.json.Decoder(MessagesRequest), _ask, _body, _events, anthropic_error
)

COUNT_TOKENS: PlainRoute[CountRequest] = PlainRoute(msgspec.json.Decoder(CountRequest), _count, anthropic_error)
