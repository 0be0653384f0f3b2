"""`ConversationTree`: the messages of the calls of one rollout to tokens. What was sampled keeps its ids.

A call continues a recorded one if its messages begin with those of that call, followed by its turn of the assistant:
only the messages after these are rendered. Two messages are the same if they say the same: keys that are null, the
order of keys, the spacing of arguments, ids of calls and thoughts do not count. Knows no HTTP and no engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..._pipeline.errors import InvalidData
from ..contracts.policies import Completion
from ..tokenizers.chat_format import ChatFormat, Tools
from ..tokenizers.chat_templates import object_in
from ..tokenizers.messages import Message, normalized

BranchReason: TypeAlias = Literal["edited", "compacted", "template", "tools", "parallel"]
"""An earlier message differs; there are fewer messages than before; the template cannot continue the turn, or writes it
in another way; other tools; another call continues the same turn already, or has the same messages."""


class KnownMessage(dict[str, Any]):
    """A message as templates read it, without nulls, that comes with every call: its key is made once."""

    @cached_property
    def key(self) -> bytes:
        """Return bytes that are equal for messages that say the same."""
        return _key(self)


@dataclass(slots=True, eq=False)
class _Sequence:
    """The tokens of a prompt, or of a turn, behind those of the turn that it continues."""

    parent: _Turn | None
    tokens: NDArray[np.int32]

    def pieces(self) -> Iterator[NDArray[np.int32]]:
        """Yield the tokens from the last piece to the first."""
        each: _Sequence | None = self
        while each is not None:
            yield each.tokens
            each = each.parent

    def all(self) -> NDArray[np.int32]:
        """Return all tokens."""
        return np.concatenate(list(self.pieces())[::-1])


@dataclass(slots=True, eq=False)
class _Turn(_Sequence):
    """A recorded call: the prompt behind its parent, and what was sampled."""

    message: Message
    tools: bytes
    sampled: NDArray[np.int32]
    continued: bool = False


@dataclass(slots=True, eq=False)
class _Node:
    """A message behind those before it."""

    children: dict[bytes, _Node] = field(default_factory=dict)
    turns: list[_Turn] = field(default_factory=list)
    """Recorded calls that gave this message."""
    prompts: dict[bytes, _Sequence] = field(default_factory=dict)
    """Prompts of recorded calls that end with this message, by tools."""

    def child(self, key: bytes) -> _Node:
        """Return the node of a message that follows."""
        if (found := self.children.get(key)) is None:
            found = self.children[key] = _Node()
        return found


@dataclass(frozen=True, slots=True, eq=False)
class CallPrompt:
    """The prompt of a call."""

    tokens: NDArray[np.int32]
    """[P] all of it."""
    branch: BranchReason | None
    """The reason why it continues no recorded call; None if it does, or if nothing is recorded."""
    messages: Sequence[Message]
    keys: Sequence[bytes]
    tools: bytes
    sequence: _Sequence


class ConversationTree:
    """The calls of one rollout, as a tree of their messages."""

    def __init__(self, chat: ChatFormat) -> None:
        self.branched: Counter[BranchReason] = Counter()
        """Recorded calls that began a branch, by reason."""
        self._chat = chat
        self._root = _Node()
        self._longest = 0
        """Messages of the longest recorded prompt."""

    def prompt(self, messages: Sequence[Message], tools: Tools | None = None) -> CallPrompt:
        """Return the prompt of a call, with `tools` in place of the format's own; nothing is recorded.

        Raises:
            InvalidData: a part of a message is no text, the last one is a turn of the assistant, or the template
                refuses them.
        """
        said = list(map(_plain, messages))
        if not said or said[-1]["role"] == "assistant":
            raise InvalidData(
                "messages: expected the last one to be of the user or of a tool, got "
                + ("none" if not said else "a turn of the assistant")
            )
        keys = [message.key if isinstance(message, KnownMessage) else _key(message) for message in said]
        tools_key = msgspec.json.encode(tools, order="sorted") if tools else b""

        def made(sequence: _Sequence, branch: BranchReason | None) -> CallPrompt:
            return CallPrompt(sequence.all(), branch, said, keys, tools_key, sequence)

        def begun(branch: BranchReason | None) -> CallPrompt:
            return made(_Sequence(None, np.asarray(self._chat.prompt(said, tools=tools), np.int32)), branch)

        path = self._path(keys)
        if len(path) == len(keys) and (same := path[-1].prompts.get(tools_key)) is not None:
            return made(same, None)
        depth = next((place for place in range(len(path), 0, -1) if path[place - 1].turns), 0)
        if not depth:
            return begun(self._difference(said))
        turn = next((turn for turn in _preferred(path[depth - 1].turns, said) if turn.tools == tools_key), None)
        if turn is None:
            return begun("tools")
        recorded = [*(node.turns[-1].message if node.turns else {} for node in path[: depth - 1]), turn.message]
        past, new = list(map(_with_thoughts, said, recorded)), said[depth:]
        between = self._chat.extend(past, new, sampled=turn.sampled, tools=tools)
        if between is None:
            return begun("template")
        edited = turn.continued and any(message["role"] == "assistant" for message in new)
        return made(_Sequence(turn, np.asarray(between, np.int32)), "edited" if edited else None)

    def record(self, prompt: CallPrompt, message: Message, completion: Completion) -> None:
        """Record a call, with the message of the assistant that was returned for it."""
        parent = prompt.sequence.parent
        branch = prompt.branch
        if branch is None and (self._longest > 0 if parent is None else parent.continued):
            branch = "parallel"
        if branch is not None:
            self.branched[branch] += 1
        if parent is not None:
            parent.continued = True
        self._longest = max(self._longest, len(prompt.messages))
        node = self._root
        for key in prompt.keys:
            node = node.child(key)
        node.prompts.setdefault(prompt.tools, prompt.sequence)
        tokens = np.concatenate([prompt.sequence.tokens, completion.tokens])
        node.child(_key(message)).turns.append(_Turn(parent, tokens, message, prompt.tools, completion.tokens))

    def _path(self, keys: Sequence[bytes]) -> list[_Node]:
        """Return the nodes of the messages, as far as they are recorded."""
        path: list[_Node] = []
        node = self._root
        for key in keys:
            if (child := node.children.get(key)) is None:
                break
            node = child
            path.append(node)
        return path

    def _difference(self, said: Sequence[Message]) -> BranchReason | None:
        """Return the reason why messages continue no recorded call."""
        if not self._longest:
            return None
        return "compacted" if len(said) < self._longest else "edited"


def _plain(message: Message) -> Message:
    """Return a message normalized; most are, and one by one that is most of the time of a long conversation."""
    if isinstance(message, KnownMessage) or (isinstance(message.get("content"), str) and None not in message.values()):
        return message
    return normalized([message])[0]


def _with_thoughts(message: Message, recorded: Message) -> Message:
    """Return a message with the thoughts that were recorded, which agents leave out."""
    thoughts = recorded.get("reasoning_content")
    return {**message, "reasoning_content": thoughts} if thoughts else message


def _preferred(turns: Sequence[_Turn], said: Sequence[Message]) -> list[_Turn]:
    """Return turns that say the same: first those whose calls have the ids of `said`, and that none continues."""
    if len(turns) == 1:
        return list(turns)
    ids = {call.get("id") for message in said for call in message.get("tool_calls") or ()}
    return sorted(
        turns,
        key=lambda turn: (
            not all(call.get("id") in ids for call in turn.message.get("tool_calls") or ()),
            turn.continued,
        ),
    )


def _key(message: Message) -> bytes:
    """Return bytes that are equal for messages that say the same."""
    if message["role"] != "assistant":
        return msgspec.json.encode(message, order="sorted")
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [(function["name"], _arguments(function.get("arguments"))) for function in functions]
    return msgspec.json.encode(("assistant", message.get("content") or "", calls), order="sorted")


def _arguments(arguments: Any) -> Any:
    return object_in(arguments) if isinstance(arguments, str) else arguments
