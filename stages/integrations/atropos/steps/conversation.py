"""What an Atropos environment asks its model, what the caller answers, and what the caller sees of it.

A conversation goes on where a call begins with all that was said before; what is new of it is the next observation.
Knows no event loop: these are values, and what follows from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from .....pipeline.errors import PenstockError
from .....schemas import InvalidRecord, StopReason

__all__ = ["Action", "Answer", "Exchange", "ModelCallRefused", "Prompt", "observed"]

FINISHED = {StopReason.STOP: "stop", StopReason.LENGTH: "length", StopReason.TOOL: "tool_calls"}
"""Reasons in the words of OpenAI's interface."""


class ModelCallRefused(PenstockError):
    """An environment asked its model for what the caller's actions cannot answer; the message says what can."""


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller says, where more than the text of it is known.

    >>> Action(text="ok", tokens=[111, 107], logprobs=[-0.1, -0.2]).finish_reason
    'stop'
    """

    text: str
    """Without the token that ends it."""
    tokens: Sequence[int] | None = None
    """[C] as they were sampled, the end-of-sequence token included."""
    logprobs: Sequence[float] | None = None
    """[C] of each token."""
    stop_reason: StopReason = StopReason.STOP

    def __post_init__(self) -> None:
        """Hold the columns to each other.

        Raises:
            InvalidRecord: log-probabilities without tokens, of another number, or not finite.
        """
        if self.logprobs is None:
            return
        count = 0 if self.tokens is None else len(self.tokens)
        if len(self.logprobs) != count or not np.isfinite(self.logprobs).all():
            raise InvalidRecord(f"logprobs: expected a finite one for each of {count} tokens, got {self.logprobs}")

    @property
    def finish_reason(self) -> str:
        """Why it ended, in OpenAI's words."""
        return FINISHED.get(self.stop_reason, "stop")


# -- calls -------------------------------------------------------------------------------------------------------------


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One call of the environment to its model."""

    messages: list[dict[str, Any]] | None = None
    """Of a chat; None where text is to be continued."""
    text: str | None = None
    """What a model is to continue; None for messages that nothing renders."""
    input_ids: list[int] | None = None
    """The same in tokens, where the environment asked for them."""
    sampling: dict[str, Any]
    """Everything else that it said: max_tokens, temperature, stop, …."""

    @classmethod
    def of_chat(cls, call: Mapping[str, Any], tokenizer: Any) -> Prompt:
        """A call of chat_completion; without a `tokenizer`, messages stay messages."""
        messages = [dict(message) for message in call["messages"]]
        text: str | None = None
        if tokenizer is not None:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return cls(messages=messages, text=text, sampling=_others(call, "messages"))

    @classmethod
    def of_text(cls, call: Mapping[str, Any]) -> Prompt:
        """A call of completion."""
        text = call["prompt"]
        if not isinstance(text, str):
            raise ModelCallRefused(f"expected a prompt of type str, got {type(text).__name__}: ask for one at a time")
        return cls(text=text, sampling=_others(call, "prompt"))


def _others(call: Mapping[str, Any], said: str) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name not in {said, "n"}}


# -- conversations -----------------------------------------------------------------------------------------------------


class Exchange(msgspec.Struct, frozen=True):
    """A call and what was answered."""

    prompt: Prompt
    action: Action

    def continued_by(self, prompt: Prompt) -> bool:
        """Whether `prompt` begins with all of this."""
        return self.new_messages(prompt) is not None or self.new_text(prompt, None) is not None

    def new_messages(self, prompt: Prompt) -> list[dict[str, Any]] | None:
        """What `prompt` says behind this; None where it does not go on with it."""
        if prompt.messages is None or self.prompt.messages is None:
            return None
        said = len(self.prompt.messages)
        before, after = prompt.messages[:said], prompt.messages[said:]
        if before != self.prompt.messages or not after or after[0].get("role") != "assistant":
            return None
        return after[1:] if _words(after[0].get("content")).strip() == self.action.text.strip() else None

    def new_text(self, prompt: Prompt, end: str | None) -> str | None:
        """The same as text, without the `end` that the action was sampled with; None where it does not go on."""
        if prompt.text is None or self.prompt.text is None:
            return None
        before = self.prompt.text + self.action.text
        if not prompt.text.startswith(before) or prompt.text == self.prompt.text:
            return None
        sampled = end if end is not None and self.action.stop_reason == StopReason.STOP else ""
        return prompt.text[len(before) :].removeprefix(sampled)


def observed(prompt: Prompt, last: Exchange | None, *, bare: bool, end: str | None) -> tuple[str, bool]:
    """What the caller sees of `prompt` after `last`, and whether it goes on with that.

    Args:
        prompt: what the environment asks.
        last: what was said before.
        bare: words alone, without the marks of a chat template.
        end: what closes an answer, and was sampled with it.
    """
    if prompt.messages is not None and (bare or prompt.text is None):
        new = None if last is None else last.new_messages(prompt)
        return _contents(prompt.messages if new is None else new), new is not None
    text = None if last is None else last.new_text(prompt, end)
    return str(prompt.text if text is None else text), text is not None


def _contents(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(words for message in messages if (words := _words(message.get("content"))))


def _words(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n\n".join(part["text"] for part in content or () if part.get("type") == "text")


# -- answers -----------------------------------------------------------------------------------------------------------


class _OpenAI(msgspec.Struct, kw_only=True):
    """Has the attributes of OpenAI's object of the same role."""

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """As dictionaries."""
        dumped: dict[str, Any] = msgspec.to_builtins(self)
        return dumped


class Message(_OpenAI):
    """What was said to a chat."""

    content: str
    role: str = "assistant"
    tool_calls: None = None
    function_call: None = None
    refusal: None = None


class Choice(_OpenAI):
    """One of the answers to a chat."""

    index: int
    message: Message
    finish_reason: str
    logprobs: None = None


class TextChoice(_OpenAI):
    """One of the continuations of a text."""

    index: int
    text: str
    finish_reason: str
    logprobs: None = None


class Answer(_OpenAI):
    """What a call gives."""

    choices: list[Any]
    object: str
    model: str = "penstock"
    id: str = ""
    created: int = 0
    usage: None = None

    @classmethod
    def to_chat(cls, actions: Sequence[Action]) -> Answer:
        """Of chat_completion."""
        said = [
            Choice(index=index, message=Message(content=action.text), finish_reason=action.finish_reason)
            for index, action in enumerate(actions)
        ]
        return cls(choices=said, object="chat.completion")

    @classmethod
    def to_text(cls, actions: Sequence[Action]) -> Answer:
        """Of completion."""
        said = [
            TextChoice(index=index, text=action.text, finish_reason=action.finish_reason)
            for index, action in enumerate(actions)
        ]
        return cls(choices=said, object="text_completion")
