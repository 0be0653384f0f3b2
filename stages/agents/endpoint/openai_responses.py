"""`/v1/responses`: OpenAI's Responses without state: each request has the whole conversation. Tools and streams."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, Any, Literal

import msgspec

from .call_fields import ENCRYPTED_THOUGHTS, MAX_MESSAGES, CallFields, Count, check_neutral, may_call_tools, sampling_of
from .chat_messages import FunctionTool, function_tool
from .refusals import unsupported
from .route import CallRoute, event
from .served_rollout import MODEL, Answer, Choice, ServedRollout


class ItemText(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A text within an item."""

    text: str
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    annotations: Any = None
    logprobs: Any = None


class InputItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An item of a conversation: a message, thoughts, a call of a function, or its output."""

    type: Literal["message", "reasoning", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ItemText] | None = None
    summary: list[ItemText] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ItemText] | None = None
    id: str | None = None
    status: Any = None
    phase: Any = None


class ResponseTool(FunctionTool, kw_only=True, forbid_unknown_fields=True):
    """A tool."""

    type: Literal["function"]


class ResponsesRequest(CallFields, kw_only=True):
    """A request for the next items of the assistant."""

    input: str | Annotated[list[InputItem], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    top_logprobs: Any = None
    include: Any = None
    reasoning: Any = None
    text: Any = None
    truncation: Any = None
    store: Any = None
    background: Any = None
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    stream_options: Any = None

    @property
    def plain_messages(self) -> list[dict[str, Any]]:
        """Return the messages as templates read them; items of one turn of the assistant are one message.

        Raises:
            RequestRefused: an item lacks a field.
        """
        first = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*first, {"role": "user", "content": self.input}]
        messages: list[dict[str, Any]] = first
        for number, item in enumerate(self.input):
            if item.type == "message" and item.role != "assistant":
                messages.append(_message(item, number))
            elif item.type == "function_call_output":
                call_id = _needed(item.call_id, number, "call_id")
                messages.append({"role": "tool", "tool_call_id": call_id, "content": _text(item.output)})
            else:
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                _add_to_turn(messages[-1], item, number)
        return messages


def _message(item: InputItem, number: int) -> dict[str, Any]:
    role = _needed(item.role, number, "role")
    return {"role": "system" if role == "developer" else role, "content": _text(item.content)}


def _add_to_turn(turn: dict[str, Any], item: InputItem, number: int) -> None:
    """Add an item of the assistant to its turn."""
    if item.type == "message":
        turn["content"] += _text(item.content)
    elif item.type == "reasoning":
        thoughts = _text(item.content) or item.encrypted_content or _text(item.summary)
        turn["reasoning_content"] = turn.get("reasoning_content", "") + thoughts
    else:
        function = {"name": _needed(item.name, number, "name"), "arguments": item.arguments or "{}"}
        call = {"id": _needed(item.call_id, number, "call_id"), "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)


def _needed(value: str | None, number: int, name: str) -> str:
    if value is None:
        raise unsupported("input", f"expected {name} in item {number}, got none")
    return value


def _text(content: str | list[ItemText] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


def _ask(rollout: ServedRollout, request: ResponsesRequest) -> Callable[[], Awaitable[Answer]]:
    check_neutral(request)
    may_call = may_call_tools(request.tool_choice)
    sampling = sampling_of(request, rollout.sampling, max_tokens=request.max_output_tokens)
    messages, tools = request.plain_messages, [function_tool(tool) for tool in request.tools or ()] or None
    return lambda: rollout.converse(messages, tools, sampling, callable_tools=may_call)


def _items(request: ResponsesRequest, answer: Answer, choice: Choice) -> list[dict[str, Any]]:
    status = "incomplete" if choice.finish == "length" else "completed"
    items: list[dict[str, Any]] = []
    if choice.reasoning is not None:
        thoughts = [{"type": "reasoning_text", "text": choice.reasoning}]
        item = {"id": f"rs-{answer.id}", "type": "reasoning", "summary": [], "content": thoughts}
        if ENCRYPTED_THOUGHTS in (request.include or ()):  # the client may drop the others: they are no secret here
            item["encrypted_content"] = choice.reasoning
        items.append(item)
    if choice.content or not choice.calls:
        said = [{"type": "output_text", "text": choice.content, "annotations": [], "logprobs": []}]
        message = {"id": f"msg-{answer.id}", "type": "message", "role": "assistant", "status": status, "content": said}
        items.append(message)
    for call in choice.calls:
        arguments = msgspec.json.encode(call.arguments).decode()
        named = {"call_id": call.id, "name": call.name, "arguments": arguments, "status": "completed"}
        items.append({"id": f"fc-{call.id}", "type": "function_call", **named})
    return items


def _begun(request: ResponsesRequest, answer: Answer) -> dict[str, Any]:
    """Return a response without output."""
    return {
        "id": answer.id,
        "object": "response",
        "created_at": answer.created,
        "status": "in_progress",
        "model": request.model or MODEL,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "metadata": request.metadata or {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": request.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": [msgspec.to_builtins(tool) for tool in request.tools or ()],
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _body(_: ServedRollout, request: ResponsesRequest, answer: Answer) -> dict[str, Any]:
    (choice,) = answer.choices
    cut = choice.finish == "length"
    prompt, sampled = len(answer.prompt), answer.sampled_tokens
    return _begun(request, answer) | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(request, answer, choice),
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        },
    }


def _events(rollout: ServedRollout, request: ResponsesRequest, answer: Answer) -> Iterator[bytes]:
    whole, begun = _body(rollout, request, answer), _begun(request, answer)
    told: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(whole["output"]):
        told += _item_events(index, item)
    told.append({"type": f"response.{whole['status']}", "response": whole})
    for number, each in enumerate(told):
        yield event({**each, "sequence_number": number}, each["type"])


def _item_events(index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of an item, from an empty one."""
    place = {"item_id": item["id"], "output_index": index}
    blank: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    yield {
        "type": "response.output_item.added",
        "output_index": index,
        "item": item | blank | {"status": "in_progress"},
    }
    if item["type"] == "function_call":
        arguments = item["arguments"]
        yield {"type": "response.function_call_arguments.delta", **place, "delta": arguments}
        yield {"type": "response.function_call_arguments.done", **place, "name": item["name"], "arguments": arguments}
    else:
        (part,) = item["content"]
        inner = place | {"content_index": 0}
        kind = "response.reasoning_text" if item["type"] == "reasoning" else "response.output_text"
        yield {"type": "response.content_part.added", **inner, "part": part | {"text": ""}}
        yield {"type": f"{kind}.delta", **inner, "delta": part["text"], "logprobs": []}
        yield {"type": f"{kind}.done", **inner, "text": part["text"], "logprobs": []}
        yield {"type": "response.content_part.done", **inner, "part": part}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


RESPONSES: CallRoute[ResponsesRequest] = CallRoute(msgspec.json.Decoder(ResponsesRequest), _ask, _body, _events)
