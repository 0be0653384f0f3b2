"""`/v1/chat/completions`: OpenAI's chat, with vLLM's `return_token_ids`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec

from ...tokenizers.chat_format import ChatFormat
from .call_fields import Count, OpenAIFields, check_neutral, may_call_tools, sampling_of
from .chat_messages import ChatTool, RawMessages, known_messages, plain_tools
from .refusals import unsupported
from .route import DONE, CallRoute, event
from .served_rollout import MODEL, Answer, Choice, NamedCall, ServedRollout


class ChatRequest(OpenAIFields, kw_only=True):
    """A request for turns of the assistant."""

    messages: RawMessages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    tools: list[ChatTool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    top_logprobs: Any = None
    response_format: Any = None
    modalities: Any = None
    store: Any = None


def _ask(rollout: ServedRollout, request: ChatRequest) -> Callable[[], Awaitable[Answer]]:
    check_neutral(request)
    may_call = may_call_tools(request.tool_choice)
    limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    sampling = sampling_of(request, rollout.sampling, max_tokens=limit)
    messages = known_messages(rollout.known, request.messages)
    tools = plain_tools(request.tools)
    return lambda: rollout.converse(messages, tools, sampling, request.n or 1, callable_tools=may_call)


def logprobs_of(rollout: ServedRollout, choice: Choice) -> dict[str, Any]:
    """Return the log-probability of each token that was sampled, as OpenAI's chat has them."""
    return {"content": token_logprobs(rollout.chat, choice), "refusal": None}


def token_logprobs(chat: ChatFormat, choice: Choice) -> list[dict[str, Any]]:
    """Return the sampled tokens as text, with their log-probabilities.

    Raises:
        RequestRefused: the engine has none.
    """
    logprobs = None if choice.call is None else choice.call.logprobs
    if logprobs is None:
        if choice.tokens:
            raise unsupported("logprobs", "the engine returns none")
        return []
    found = []
    for token, logprob in zip(choice.tokens, logprobs.tolist(), strict=True):
        text = chat.tokenizer.decode([token])
        found.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return found


def usage_of(answer: Answer) -> dict[str, int]:
    """Return the numbers of tokens of an answer."""
    prompt, sampled = len(answer.prompt), answer.sampled_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def call_in_json(call: NamedCall) -> dict[str, Any]:
    """Return a call of a tool, as OpenAI has it."""
    arguments = msgspec.json.encode(call.arguments).decode()
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _message(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.content or (None if choice.calls else "")}
    if choice.reasoning is not None:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["tool_calls"] = [call_in_json(call) for call in choice.calls]
    return message


def of_choice(request: OpenAIFields, index: int, choice: Choice) -> dict[str, Any]:
    """Return the fields that a choice has in every form of OpenAI's answers."""
    fields: dict[str, Any] = {"index": index, "finish_reason": choice.finish, "logprobs": None}
    if choice.call is not None:
        fields["call_id"] = choice.call.id
    if choice.stop is not None:
        fields["stop_reason"] = choice.stop
    if request.return_token_ids:
        fields["token_ids"] = choice.tokens
    return fields


def _body(rollout: ServedRollout, request: ChatRequest, answer: Answer) -> dict[str, Any]:
    choices = []
    for index, choice in enumerate(answer.choices):
        fields = of_choice(request, index, choice) | {"message": _message(choice)}
        if request.logprobs:
            fields["logprobs"] = logprobs_of(rollout, choice)
        choices.append(fields)
    return head_of(request, answer, "chat.completion") | {"choices": choices, "usage": usage_of(answer)}


def head_of(request: OpenAIFields, answer: Answer, kind: str) -> dict[str, Any]:
    """Return the fields that every answer, and every event of a stream, of OpenAI begins with."""
    head = {"id": answer.id, "object": kind, "created": answer.created, "model": request.model or MODEL}
    return head | ({"prompt_token_ids": answer.prompt.tolist()} if request.return_token_ids else {})


def _deltas(choice: Choice) -> Iterator[dict[str, Any]]:
    """Yield the changes of a message, from an empty one."""
    yield {"role": "assistant", "content": ""}
    if choice.reasoning is not None:
        yield {"reasoning_content": choice.reasoning}
    if choice.content:
        yield {"content": choice.content}
    for index, call in enumerate(choice.calls):
        yield {"tool_calls": [{"index": index, **call_in_json(call)}]}


def _events(rollout: ServedRollout, request: ChatRequest, answer: Answer) -> Iterator[bytes]:
    first = head_of(request, answer, "chat.completion.chunk")
    head = {name: value for name, value in first.items() if name != "prompt_token_ids"}
    for index, choice in enumerate(answer.choices):
        last = of_choice(request, index, choice)
        if request.logprobs:
            last["logprobs"] = logprobs_of(rollout, choice)
        for delta in _deltas(choice):
            yield event(
                first | {"choices": [{"index": index, "delta": delta, "finish_reason": None, "logprobs": None}]}
            )
            first = head
        yield event(head | {"choices": [last | {"delta": {}}]})
    if request.stream_options is not None and request.stream_options.include_usage:
        yield event(head | {"choices": [], "usage": usage_of(answer)})
    yield DONE


CHAT_COMPLETIONS: CallRoute[ChatRequest] = CallRoute(msgspec.json.Decoder(ChatRequest), _ask, _body, _events)
