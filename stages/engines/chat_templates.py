"""The chat template of a tokenizer: which one it is, and messages to text by it, as transformers renders them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..._pipeline.errors import InvalidData
from ..._pipeline.util.extras import extra


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
    generation_prompt: bool = True,
) -> str:
    """Return the text of `messages`, and of the beginning of the policy's turn if there is a `generation_prompt`.

    Raises:
        InvalidData: the template refuses these messages.
        MissingExtra: transformers is not installed.
    """
    present = [{key: value for key, value in message.items() if value is not None} for message in messages]
    render, template_error = renderer()
    try:
        ((text,), _) = render(
            conversations=[present],
            tools=[dict(tool) for tool in tools] or None,
            chat_template=template_of(tokenizer, tools=bool(tools)),
            add_generation_prompt=generation_prompt,
            **getattr(tokenizer, "special_tokens_map", {}),
        )
    except template_error as error:
        roles = ", ".join(str(message.get("role")) for message in present)
        raise InvalidData(
            f"{tokenizer!r}: expected messages that its chat template takes, got roles {roles}: {error}"
        ) from error
    return str(text)


def renderer() -> tuple[Callable[..., Any], type[Exception]]:
    """Return the function that renders templates, and the error of a template.

    Raises:
        MissingExtra: transformers is not installed.
    """
    with extra("train", "ChatFormat"):
        from jinja2 import TemplateError, ext  # noqa: F401, PLC0415 (transformers renders with it)
        from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415 (a second to import)
    return render_jinja_template, TemplateError
