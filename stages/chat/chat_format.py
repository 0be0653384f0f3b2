"""`ChatFormat`: messages to the tokens of a prompt, and to the tokens between two turns of the policy.

The tokens of a turn are those that the policy sampled: they are never rendered or tokenized again. So a template is
usable for several turns only if it writes earlier turns as they were sampled; any other is refused. Templates are
rendered by transformers, as its `apply_chat_template` does. Knows no environment and no policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

from ..._pipeline.errors import InvalidConfig, UnstableTemplate
from ..engines.chat_templates import rendered, renderer, template_of
from ..engines.end_tokens import TURN, end_ids_of, named
from ..engines.policies import Tokenizer

Message: TypeAlias = Mapping[str, Any]
"""`{"role": "user", "content": "…"}`, with any other keys that the template reads."""

ObservationRole: TypeAlias = Literal["user", "tool"]

PROBES = ("an answer", "<think>\na thought\n</think>\n\nan answer")
"""Turns that a template must write unchanged where another message follows."""


@dataclass(frozen=True)
class ChatFormat:
    """The chat template of a tokenizer, for prompts and for conversations of several turns."""

    tokenizer: Tokenizer
    """A `PretrainedTokenizer`, or another with a `chat_template`, and with `special_tokens_map` if the template uses
    names of special tokens."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of functions that the policy may call, as the template expects them."""
    observation_role: ObservationRole = "user"
    """Role of an observation that is text."""

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            InvalidConfig: the tokenizer has no template, or a field has another type.
            MissingExtra: transformers is not installed.
        """
        renderer()
        if template_of(self.tokenizer, tools=bool(self.tools)) is None:
            raise InvalidConfig(
                f"ChatFormat.tokenizer: expected a tokenizer with a chat template, got none in {self.tokenizer!r}: "
                f"write one to chat_template.jinja in its folder"
            )
        if isinstance(self.tools, Mapping) or not all(isinstance(tool, Mapping) for tool in self.tools):
            raise InvalidConfig(f"ChatFormat.tools: expected a sequence of JSON schemas, got {self.tools!r}")
        object.__setattr__(self, "tools", tuple(self.tools))
        if self.observation_role not in {"user", "tool"}:
            raise InvalidConfig(f"ChatFormat.observation_role: expected user or tool, got {self.observation_role!r}")

    def prompt(self, messages: Sequence[Message], /) -> list[int]:
        """Return the tokens of `messages` and of the beginning of the policy's turn.

        Raises:
            InvalidData: the template refuses these messages.
        """
        return list(self.tokenizer.encode(self._rendered(messages)))

    def after(self, messages: Sequence[Message], new: Sequence[Message], *, ended: bool = True) -> list[int]:
        """Return the tokens between the policy's last turn and its next one.

        Args:
            messages: the conversation so far; the last message is the policy's turn.
            new: the messages that follow it.
            ended: whether the policy sampled the token with which the template ends a turn; else the returned tokens
                begin with it.

        Raises:
            UnstableTemplate: see `check_turns`.
            InvalidData: the template refuses these messages.
        """
        self.check_turns()
        turn = {"role": "assistant", "content": TURN}
        between = self._between(self._rendered(messages[:-1]), self._rendered([*messages[:-1], turn, *new]), TURN)
        tokens = list(self.tokenizer.encode(between))
        return tokens[1:] if ended else tokens

    def check_turns(self) -> None:
        """Check that the template writes earlier turns of the policy as they were sampled; a second call costs nothing.

        Raises:
            UnstableTemplate: it changes them, or does not end them with a token that ends a completion.
        """
        if self._instability is not None:
            raise UnstableTemplate(self._instability)

    @cached_property
    def _instability(self) -> str | None:
        """The reason to refuse the template for several turns; None if there is none."""
        try:
            for probe in PROBES:
                self._probe(probe, self.observation_role)
        except UnstableTemplate as error:
            return f"{error}; {self._advice()}"
        return None

    def _probe(self, turn: str, role: ObservationRole) -> None:
        """Render a conversation of two turns, message by message.

        Raises:
            UnstableTemplate: the tokens of a turn or before it change when others follow.
        """
        messages: list[Message] = [{"role": "user", "content": "a question"}]
        text = self._rendered(messages)
        for observation in ("one observation", "another observation"):
            messages += [{"role": "assistant", "content": turn}, {"role": role, "content": observation}]
            before, text = text, self._rendered(messages)
            self._between(before, text, turn)

    def _between(self, before: str, text: str, turn: str) -> str:
        """Return the part of `text` that follows `turn`, which follows `before`, from the end token on.

        Raises:
            UnstableTemplate: `text` has no such parts.
        """
        head, found, rest = text[len(before) :].partition(turn)
        if not text.startswith(before) or not found or head.strip():
            raise UnstableTemplate(
                f"{self.tokenizer!r}: expected a chat template that writes an earlier turn of the assistant as it was "
                f"sampled, {before + turn!r}, got {text!r}"
            )
        ids = list(self.tokenizer.encode(rest))
        if not ids or ids[0] not in end_ids_of(self.tokenizer):
            raise UnstableTemplate(
                f"{self.tokenizer!r}: expected a chat template that writes an end token, one of "
                f"{named(self.tokenizer)}, after a turn of the assistant, got {rest!r}"
            )
        return rest

    def _advice(self) -> str:
        other: ObservationRole = "tool" if self.observation_role == "user" else "user"
        stable = False
        try:
            for probe in PROBES:
                self._probe(probe, other)
            stable = True
        except Exception:  # noqa: BLE001, S110 (a template may refuse the role in any way)
            pass
        advice = "write one that does to chat_template.jinja in the tokenizer's folder, from which servers load it too"
        return f'{advice}; or use ChatFormat(observation_role="{other}"), with which it does' if stable else advice

    def _rendered(self, messages: Sequence[Message]) -> str:
        """Return the text of `messages` and of the beginning of the policy's turn."""
        return rendered(self.tokenizer, messages, self.tools)
