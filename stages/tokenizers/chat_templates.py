"""The chat template of a tokenizer: its choice, and messages to text by it, as transformers renders them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from ..._pipeline.errors import InvalidData
from ..._pipeline.util.extras import extra

PROBE = "penstock content"
"""Content that is searched in the output of a template."""

CALL_ID = "call00000"
"""As long as Mistral's template requires it."""


def template_of(tokenizer: Any, *, tools: bool = False) -> str | None:
    """Return the template of `tokenizer`; of several, the one for `tools` if there are any. None if it has none."""
    found = getattr(tokenizer, "chat_template", None)
    if isinstance(found, list):  # as tokenizer_config.json has several
        found = {each["name"]: each["template"] for each in found}
    if isinstance(found, Mapping):
        found = found.get("tool_use" if tools and "tool_use" in found else "default")
    return found or None


def rendered(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    arguments: Mapping[str, Any] | None = None,
    generation_prompt: bool = True,
) -> str:
    """Return the text of `messages`, and of the beginning of the policy's turn if there is a `generation_prompt`.

    The content of messages is text, or absent. `arguments` are those of the template, by name. Arguments of calls of
    tools are given as the template writes them: as an object, or as JSON.

    Raises:
        InvalidData: the template refuses these messages.
        MissingExtra: transformers is not installed.
    """
    template = template_of(tokenizer, tools=bool(tools))
    special: Mapping[str, str] = getattr(tokenizer, "special_tokens_map", {})
    given = [_with_arguments(message, as_text=bool(template) and _takes_json(template)) for message in messages]
    if template and _takes_parts(template):
        given = [_in_parts(message) for message in given]
    render = renderer()
    try:
        ((text,), _) = render(
            conversations=[given],
            tools=[dict(tool) for tool in tools] or None,
            chat_template=template,
            add_generation_prompt=generation_prompt,
            **{**special, **(arguments or {})},
        )
    except Exception as error:  # a template is a program: jinja's errors, and any of Python
        roles = ", ".join(str(message.get("role")) for message in given)
        raise InvalidData(
            f"{tokenizer!r}: expected messages that its chat template takes, got roles {roles}: {error}"
        ) from error
    return str(text)


@lru_cache(maxsize=64)
def _takes_parts(template: str) -> bool:
    """Return whether `template` writes the content of a message as a list of parts only, as some for images do."""
    render, message = renderer(), {"role": "user", "content": PROBE}

    def writes(message: Mapping[str, Any]) -> bool:
        try:
            ((text,), _) = render(conversations=[[message]], chat_template=template, bos_token="", eos_token="")
        except Exception:  # noqa: BLE001 (a template is a program)
            return False
        return PROBE in str(text)

    return not writes(message) and writes(_in_parts(message))


@lru_cache(maxsize=64)
def _takes_json(template: str) -> bool:
    """Return whether `template` writes the arguments of a call as they are, so that an object is no JSON there."""
    render, call = renderer(), call_of("tool", {PROBE: PROBE})
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "name": "tool", "tool_call_id": CALL_ID, "content": "a result"}
    messages: list[Mapping[str, Any]] = [{"role": "user", "content": "a question"}, said, result]

    def text(*, as_text: bool) -> str:
        given = [_with_arguments(message, as_text=as_text) for message in messages]
        try:
            ((text,), _) = render(conversations=[given], chat_template=template, bos_token="", eos_token="")
        except Exception:  # noqa: BLE001 (a template is a program)
            return ""
        return str(text)

    written = text(as_text=False)
    return (PROBE not in written or f"'{PROBE}'" in written) and PROBE in text(as_text=True)


def call_of(name: str, arguments: Any, call_id: str = CALL_ID) -> dict[str, Any]:
    """Return a call of a tool, as a message of the assistant has it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _with_arguments(message: Mapping[str, Any], *, as_text: bool) -> dict[str, Any]:
    """Return a message of which the arguments of calls are objects, or JSON; arguments that are neither stay."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return dict(message)
    return {**message, "tool_calls": [_call_with_arguments(call, as_text=as_text) for call in calls]}


def _call_with_arguments(call: Any, *, as_text: bool) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if as_text and isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        arguments = object_in(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def object_in(text: str) -> Any:
    """Return the object that `text` is in JSON, or `text` where it is another."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else dict(message)


def renderer() -> Callable[..., Any]:
    """Return the function that renders templates.

    Raises:
        MissingExtra: transformers is not installed.
    """
    with extra("train", "ChatFormat"):
        from jinja2 import ext  # noqa: F401, PLC0415 (transformers renders with it)
        from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415 (a second to import)
    function: Callable[..., Any] = render_jinja_template
    return function
