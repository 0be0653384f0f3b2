"""The conversation of one episode: observations to tokens, as text or by a chat template. Knows no environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..._pipeline.errors import UnstableTemplate
from ..contracts.policies import Completion, Tokenizer
from .chat_format import ChatFormat
from .end_tokens import end_ids_of
from .messages import Message, asked, normalized
from .start_tokens import prompt_ids


class ConversationEncoder(Protocol):
    """Converts the observations of an environment; of one rollout."""

    @property
    def meta(self) -> Mapping[str, Any]:
        """Return facts about the prompt, for the `meta` of the group."""
        ...

    def begin(self, observation: Any, /) -> NDArray[np.int32]:
        """Return the tokens of the prompt, at least one."""
        ...

    def go_on(self, completion: Completion, observation: Any, /) -> NDArray[np.int32]:
        """Return the tokens between `completion` and the next turn of the policy."""
        ...


def conversation(tokenizer: Tokenizer, chat: ChatFormat | None) -> ConversationEncoder:
    """Return a conversation that has not begun: by `chat`, or of plain text."""
    return TextConversation(tokenizer) if chat is None else ChatConversation(chat)


class TextConversation:
    """Observations are encoded as they are, the first one after the tokens that begin a text."""

    meta: Mapping[str, Any] = {}

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def begin(self, observation: Any) -> NDArray[np.int32]:
        """See `ConversationEncoder`.

        Raises:
            TypeError: the observation is no text.
            ValueError: it has no tokens.
        """
        prompt = np.asarray(prompt_ids(self._tokenizer, _text(observation)), np.int32)
        if not len(prompt):
            raise ValueError(f"expected a prompt of at least one token, got none for {observation!r}")
        return prompt

    def go_on(self, _: Completion, observation: Any, /) -> NDArray[np.int32]:
        """See `ConversationEncoder`.

        Raises:
            TypeError: the observation is no text.
        """
        return np.asarray(self._tokenizer.encode(_text(observation)), np.int32)


def _text(observation: Any) -> str:
    if not isinstance(observation, str):
        raise TypeError(f"expected an observation of type str, got {type(observation).__name__}")
    return observation


class ChatConversation:
    """Observations are messages, and text is the content of one."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._messages: list[Message] = []
        """All messages so far, with the turns of the policy as text."""
        self.meta: Mapping[str, Any] = {}

    def begin(self, observation: Any) -> NDArray[np.int32]:
        """See `ConversationEncoder`.

        Raises:
            TypeError: the observation is neither text nor a list of messages.
            InvalidData: a part of a message is no text.
        """
        self._messages = list(asked(self._as_messages(observation, "user")))
        self.meta = {"messages": list(self._messages)}
        return np.asarray(self._chat.prompt(self._messages), np.int32)

    def go_on(self, completion: Completion, observation: Any) -> NDArray[np.int32]:
        """See `ConversationEncoder`.

        Raises:
            TypeError: the observation is neither text nor a list of messages.
            UnstableTemplate: the template cannot continue the turn.
            InvalidData: it refuses the messages.
        """
        self._messages.append({"role": "assistant", "content": text_of(self._chat.tokenizer, completion)})
        new = normalized(self._as_messages(observation, self._chat.observation_role))
        between = self._chat.extend(self._messages, new, sampled=completion.tokens)
        if between is None:
            self._chat.check_turns()
            self._chat.prompt([*self._messages, *new])  # raises what the template says
            raise UnstableTemplate(
                f"{self._chat.tokenizer!r}: expected a chat template that ends every turn alike, got one that ends "
                f"{self._messages[-1]['content']!r:.80} in another way"
            )
        self._messages += new
        return np.asarray(between, np.int32)

    @staticmethod
    def _as_messages(observation: Any, role: str) -> Sequence[Message]:
        if isinstance(observation, str):
            return [{"role": role, "content": observation}]
        if not isinstance(observation, Sequence) or not all(isinstance(message, Mapping) for message in observation):
            raise TypeError(f"expected an observation of type str or a list of messages, got {observation!r}")
        return observation


def text_of(tokenizer: Tokenizer, completion: Completion) -> str:
    """Return the text of a completion, without the token that ends it."""
    tokens = completion.tokens
    if len(tokens) and int(tokens[-1]) in end_ids_of(tokenizer):
        tokens = tokens[:-1]
    return tokenizer.decode(tokens.tolist())
