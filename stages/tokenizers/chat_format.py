"""`ChatFormat`: messages to the tokens of a prompt, and to the tokens between two turns of the policy.

The tokens of a turn are those that the policy sampled: they are never rendered or tokenized again. So only the text of
a template between two turns matters; it is found around a turn with known content. Most templates write an earlier turn
in another way than it was sampled, without its thoughts: a warning names the difference, and `strict` refuses it.
transformers renders the templates, as its `apply_chat_template` does. Knows no environment and no policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..._pipeline.accounting.telemetry import get_logger
from ..._pipeline.errors import InvalidConfig, InvalidData, UnstableTemplate
from ..._schemas.choices import check_choice
from ..contracts.policies import Tokenizer
from .chat_templates import CALL_ID, call_of, rendered, renderer, template_of
from .end_tokens import TURN, end_ids_of, named
from .messages import Message, asked, normalized, with_names
from .tool_calls import TOOL_CALL_PARSERS, ToolCall, ToolCallParser, parse_turn

log = get_logger("penstock.chat")

ObservationRole: TypeAlias = Literal["user", "tool"]

History: TypeAlias = Literal["keep", "template"]
"""Sampled turns stay as they are, or a conversation begins anew where the template would change them."""

Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""JSON schemas of functions."""

PROBES = ("an answer", "<think>\na thought\n</think>\n\nan answer")
"""Turns that a template writes unchanged where another message follows, if it changes no turns."""

RESERVED = {"conversations", "messages", "tools", "chat_template", "add_generation_prompt", "documents"}
"""Names that a template is given by other means than `arguments`."""

OBSERVATION = "penstock observation"
"""Content of the message that is searched after a turn."""

IN_A_CALL = {"text": TURN}
"""Arguments of a call of a tool that is all of a turn."""

TOOL = {"type": "function", "function": {"name": "tool", "description": "a tool", "parameters": {"type": "object"}}}
"""Its schema."""

KNOWN_SHAPES = 1024
"""Shapes of conversations that are remembered: agents make any number of them."""

QUESTION: Message = {"role": "user", "content": "a question"}
"""The beginning of a conversation."""


_Follow: TypeAlias = tuple[tuple[str, ...], bool]
"""Roles of the messages after a turn; whether there are tools."""

_Shape: TypeAlias = tuple[_Follow, tuple[str, ...], int]
"""A `_Follow`; the roles of the first message, and of the last before the turn; the number of its calls."""

_Beginning: TypeAlias = Literal["question", "system", "whole"]
"""A question alone, one after the system's message and the tools, and the conversation as it is."""


@dataclass(frozen=True, slots=True)
class _Ending:
    """The end of a turn of the assistant in a template, before another message."""

    skipped: int
    """Tokens between the content of the turn and the token that ends it."""
    token: int
    arguments: Any = None
    """Those of the call of a tool that the template requires in the turn; None if it requires no call."""


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
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the template by name, such as `{"enable_thinking": False}`."""
    strict: bool = False
    """Refuse a template that writes an earlier turn in another way than it was sampled, in place of a warning."""
    tool_calls: str | ToolCallParser | None = None
    """The format of calls of tools in a turn, see `TOOL_CALL_PARSERS`, or a parser; by default the one that the
    template writes, or else `hermes`."""
    history: History = "keep"
    """Of agents: `keep` what was sampled, also thoughts that the template drops from earlier turns; or begin a branch
    where the `template` writes a turn in another way."""
    _endings: dict[tuple[ObservationRole, bool], _Ending | str] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _beginnings: dict[_Shape, _Beginning] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The beginning of a conversation that is enough for the text after its last turn, by the shape of both."""
    _changes: dict[_Follow, tuple[str, str]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The template's changes of each of `PROBES`, by the roles that follow, and whether there are tools."""

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
        _check_tools("ChatFormat.tools", self.tools)
        object.__setattr__(self, "tools", tuple(self.tools))
        if self.observation_role not in {"user", "tool"}:
            raise InvalidConfig(f"ChatFormat.observation_role: expected user or tool, got {self.observation_role!r}")
        check_choice("ChatFormat.history", self.history, History)
        if isinstance(self.tool_calls, str):
            check_choice("ChatFormat.tool_calls", self.tool_calls, TOOL_CALL_PARSERS)
        if not isinstance(self.arguments, Mapping) or not all(isinstance(name, str) for name in self.arguments):
            raise InvalidConfig(f"ChatFormat.arguments: expected arguments by name, got {self.arguments!r}")
        if taken := sorted(RESERVED & self.arguments.keys()):
            raise InvalidConfig(f"ChatFormat.arguments: expected arguments of the template's own, got {taken[0]!r}")

    def prompt(self, messages: Sequence[Message], /, *, tools: Tools | None = None) -> list[int]:
        """Return the tokens of `messages` and of the beginning of the policy's turn.

        Turns of the assistant at the end are answers, and no part of the prompt.

        Args:
            messages: the conversation. Arguments of calls may be objects or JSON, and results of tools may have the id
                of a call in place of a name, as OpenAI's API sends them.
            tools: schemas of this prompt, in place of the format's own.

        Raises:
            InvalidConfig: the tools are no sequence of schemas.
            InvalidData: the template refuses these messages, or a part of them is no text.
        """
        return list(self.tokenizer.encode(self._rendered(with_names(asked(messages)), self._tools(tools))))

    def extend(
        self,
        messages: Sequence[Message],
        new: Sequence[Message],
        *,
        sampled: Sequence[int] | NDArray[np.int32] = (),
        tools: Tools | None = None,
    ) -> list[int] | None:
        """Return the tokens that follow `sampled` in the next prompt; None if that begins anew, with `prompt`.

        With `history="template"`, it begins anew if the template removes or rewrites sampled turns once `new` follows.
        In any case it does so if the template cannot continue a turn, or refuses these messages. Takes time in
        proportion to `new`, if the template writes what follows a turn alike after any beginning.

        Args:
            messages: the conversation so far, with the thoughts of its turns; the last message is the policy's turn.
            new: the messages that follow it.
            sampled: the tokens of that turn. If they end with the template's end of a turn, it is not repeated.
            tools: schemas of the next prompt, in place of the format's own.
        """
        try:
            if self.history == "keep":
                self.check_turns()
            elif self._rewrites(messages, new, self._tools(tools)):
                return None
            tokens = self._between(messages, normalized(new), self._tools(tools))
        except (UnstableTemplate, InvalidData):
            return None
        return tokens[1:] if len(sampled) and sampled[-1] == tokens[0] else tokens

    def check_turns(self) -> None:
        """Check that the template is usable for several turns; a second call is free.

        Raises:
            UnstableTemplate: it does not end turns with a token that ends a completion, or refuses a message of the
                `observation_role`; with `strict`, it writes earlier turns in another way than they were sampled.
        """
        ending = self._ending(self.observation_role)
        if isinstance(ending, str):
            raise UnstableTemplate(ending)
        if self._difference and self.strict:
            raise UnstableTemplate(f"{self._difference}; {self._advice()}")

    @cached_property
    def tool_call_format(self) -> str | None:
        """Return the parser in `TOOL_CALL_PARSERS` that reads the calls that the template writes; None if none does."""
        call = ToolCall(name="tool", arguments=IN_A_CALL)
        said = {"role": "assistant", "content": "", "tool_calls": [call_of(call.name, call.arguments)]}
        answer = {"role": "assistant", "content": TURN}
        try:
            begin, _, end = self._rendered([QUESTION, answer], [TOOL], prompt=False).partition(TURN)
            text = self._rendered([QUESTION, said], [TOOL], prompt=False)
        except InvalidData:
            return None
        turn = text.rstrip().removeprefix(begin.rstrip()).removesuffix(end.strip())
        return next((name for name in TOOL_CALL_PARSERS if parse_turn(turn, name).calls == (call,)), None)

    # -- between turns -------------------------------------------------------------------------------------------------

    def _between(self, messages: Sequence[Message], new: Sequence[Message], tools: Tools) -> list[int]:
        """Return the tokens from the end of the last of `messages` to the next turn's beginning, with `new` between.

        Raises:
            UnstableTemplate: the template ends this turn otherwise than that of `check_turns`.
            InvalidData: the template refuses the messages.
        """
        role: ObservationRole = "tool" if any(message["role"] == "tool" for message in new) else "user"
        ending = self._ending(role, calls=role == "tool" and bool(messages[-1].get("tool_calls")))
        if isinstance(ending, str):
            raise UnstableTemplate(ending)
        ids = self._after_last(messages, with_names(new, messages), ending.arguments, tools)
        place = ids.index(ending.token) if ending.token in ids else -1
        if place < 0 or (ending.arguments is None and place != ending.skipped):
            raise UnstableTemplate(
                f"{self.tokenizer!r}: expected a chat template that ends each turn of the assistant with "
                f"{self.tokenizer.decode([ending.token])!r}, got {self.tokenizer.decode(ids[:8])!r}; {ADVICE}"
            )
        return ids[place:]

    def _after_last(
        self, messages: Sequence[Message], new: Sequence[Message], arguments: Any, tools: Tools
    ) -> list[int]:
        """Return the tokens after the content of the last turn, from the shortest beginning that gives them.

        The first conversation of a shape is rendered as a whole, and compared.
        """
        before = messages[:-1]
        system = [message for message in before[:1] if message["role"] == "system"]
        beginnings: Mapping[_Beginning, tuple[Sequence[Message], Tools]] = {
            "question": ([QUESTION], ()),
            "system": ([*system, QUESTION], tools),
            "whole": (before, tools),
        }

        def ids_after(beginning: _Beginning) -> list[int]:
            said, given = beginnings[beginning]
            return self._after_turn(with_names(normalized(said)), new, arguments, given, calls)

        calls = messages[-1].get("tool_calls") or ()
        roles = tuple(message["role"] for message in (*before[:1], *before[-1:]))
        shape = (_following(new, tools), roles, len(calls))
        if shape not in self._beginnings:
            _make_room(self._beginnings)
            whole = ids_after("whole")
            self._beginnings[shape] = "whole"
            for beginning in ("system", "question"):
                with suppress(InvalidData):
                    if ids_after(beginning) == whole:
                        self._beginnings[shape] = beginning
        return ids_after(self._beginnings[shape])

    def _after_turn(
        self,
        before: Sequence[Message],
        new: Sequence[Message],
        arguments: Any = None,
        tools: Tools = (),
        calls: Sequence[Any] = (),
    ) -> list[int]:
        """Return the tokens after the content of a turn.

        If there are `arguments` for calls, it has the `calls` that are known, or one for each result.
        """
        past = [_without_content(message) for message in before]
        turn: dict[str, Any] = {"role": "assistant", "content": "" if arguments == IN_A_CALL else TURN}
        if calls and arguments is not None:
            turn["tool_calls"] = [
                call_of(call["function"]["name"], arguments, call.get("id", CALL_ID)) for call in calls
            ]
        messages = [*past, turn, *new]
        text = self._rendered(messages if arguments is None else _with_calls(messages, arguments), tools)
        _, found, rest = text.rpartition(TURN)
        return list(self.tokenizer.encode(rest)) if found else []

    def _ending(self, role: ObservationRole, *, calls: bool = False) -> _Ending | str:
        """Return the template's end of a turn before a message of `role`; the reason if it is not usable.

        1. The turn is text; the last form if it is known that the turn `calls` tools.
        2. The turn calls a tool, as some templates require before a message of a tool.
        3. The turn is a call, and the template writes no other content before its result.
        """
        if (role, calls) not in self._endings:
            forms: tuple[Any, ...] = (None, {}, IN_A_CALL) if role == "tool" else (None,)
            tried = [self._tried(role, arguments) for arguments in (forms[1:] + forms[:1] if calls else forms)]
            found = [ending for ending in tried if isinstance(ending, _Ending)]
            self._endings[role, calls] = (found or tried)[0]
        return self._endings[role, calls]

    def _tried(self, role: ObservationRole, arguments: Any) -> _Ending | str:
        """Find the end of a turn in a conversation of two turns."""
        observed: Message = {"role": role, "content": OBSERVATION}
        before = [QUESTION, {"role": "assistant", "content": "an answer"}, observed]
        try:
            ids = self._after_turn(before, [observed], arguments, self.tools)
        except InvalidData as error:
            return str(error)
        text = self.tokenizer.decode(ids)
        if OBSERVATION not in text:
            return (
                f"{self.tokenizer!r}: expected a chat template that writes a message of the role {role!r} after a turn "
                f"of the assistant, got {text!r}; {ADVICE}"
            )
        if ending := self._end_in(ids, calls=arguments is not None):
            return replace(ending, arguments=arguments)
        return (
            f"{self.tokenizer!r}: expected a chat template that writes an end token, one of {named(self.tokenizer)}, "
            f"after a turn of the assistant, got {text!r}; {ADVICE}"
        )

    def _end_in(self, ids: Sequence[int], *, calls: bool) -> _Ending | None:
        """Find the end of the turn in the tokens after its content.

        1. The first token that ends completions. All before it belongs to the turn, as sampled: white space, special
           tokens such as the end of an answer, and calls of tools.
        2. A special token that ends turns only where another follows, such as `<|end|>` of Harmony.
        """
        added: frozenset[int] = frozenset(getattr(self.tokenizer, "get_added_tokens_decoder", dict)())
        ends = end_ids_of(self.tokenizer)
        first = next((place for place, token in enumerate(ids) if token in ends), None)
        if first is not None:
            of_turn = self.tokenizer.decode([token for token in ids[:first] if calls or token not in added])
            if OBSERVATION not in of_turn and (calls or not of_turn.strip()):
                return _Ending(first, ids[first])
        return None if calls or ids[0] not in added else _Ending(0, ids[0])

    # -- earlier turns -------------------------------------------------------------------------------------------------

    def _rewrites(self, messages: Sequence[Message], new: Sequence[Message], tools: Tools) -> bool:
        """Return whether the template writes sampled turns in another way once `new` follows.

        1. It does so with any turn.
        2. It writes calls alone, and the turn says more.
        3. It removes thoughts: those of the last turn, and of the turns that tools' messages alone have followed, if it
           removes none before them.
        """
        turn = messages[-1]
        answers, thoughts = self._changes_before(_following(new, tools), tools)
        says_more = bool(turn.get("tool_calls") and (turn.get("content") or _thinks(turn)))
        if answers or (says_more and self._writes_calls_alone):
            return True
        return bool(thoughts) and any(map(_thinks, self._kept_until_now(messages, tools)))

    @cached_property
    def _writes_calls_alone(self) -> bool:
        """True if the template writes the calls of a turn without its content."""
        turn = {"role": "assistant", "content": TURN, "tool_calls": [call_of("tool", {})]}
        with suppress(InvalidData):
            return TURN not in self._rendered([QUESTION, turn], [TOOL], prompt=False)
        return True

    def _kept_until_now(self, messages: Sequence[Message], tools: Tools) -> Iterator[Message]:
        """Iterate over the last turns, of which the template has written the thoughts so far."""
        yield messages[-1]
        earlier = list(takewhile(lambda message: message["role"] != "user", reversed(messages[:-1])))
        if earlier and not self._changes_before((("tool",), bool(tools)), tools)[1]:
            yield from (message for message in earlier if message["role"] == "assistant")

    @cached_property
    def _difference(self) -> str:
        """The template's change of earlier turns, for the log; empty without one."""
        following = ((self.observation_role,), bool(self.tools))
        difference = next(filter(None, self._changes_before(following, self.tools)), "")
        if difference and not self.strict:
            log.warning("earlier_turns_change", difference=difference, advice=self._advice())
        return difference

    def _changes_before(self, following: _Follow, tools: Tools) -> tuple[str, str]:
        """Return the changes of an answer, and of an answer with thoughts, before messages of these roles."""
        if following not in self._changes:
            _make_room(self._changes)
            answer, thoughts = (self._changed(probe, following[0], tools) for probe in PROBES)
            self._changes[following] = (answer, thoughts)
        return self._changes[following]

    def _changed(self, turn: str, roles: Sequence[str], tools: Tools) -> str:
        """Render a conversation of two turns, message by message; return the change of a turn or its prefix."""
        ending = self._ending("tool" if "tool" in roles else "user")
        arguments = ending.arguments if isinstance(ending, _Ending) else None
        if arguments == IN_A_CALL and turn == PROBES[0]:
            turn = ""  # the template writes the call alone
        messages: list[Message] = [QUESTION]
        text = self._rendered(messages, tools)
        for number in range(2):
            messages.append({"role": "assistant", "content": turn})
            messages += [{"role": role, "content": f"observation {number}"} for role in roles]
            written = messages if arguments is None else _with_calls(messages, arguments)
            before, text = text, self._rendered(written, tools)
            if not text.startswith(before) or not text[len(before) :].lstrip().startswith(turn):
                return (
                    f"{self.tokenizer!r}: expected a chat template that writes an earlier turn of the assistant as it "
                    f"was sampled, {before + turn!r}, got {text!r}"
                )
        return ""

    def _advice(self) -> str:
        other: ObservationRole = "tool" if self.observation_role == "user" else "user"
        usable = isinstance(self._ending(other), _Ending)
        unchanged = usable and not any(self._changes_before(((other,), bool(self.tools)), self.tools))
        return f'{ADVICE}; or use ChatFormat(observation_role="{other}"), with which it does' if unchanged else ADVICE

    def _tools(self, tools: Tools | None) -> Tools:
        """Return the schemas of a call, which default to the format's own."""
        if tools is None:
            return self.tools
        _check_tools("tools", tools)
        return tools

    def _rendered(self, messages: Sequence[Message], tools: Tools = (), *, prompt: bool = True) -> str:
        """Return the text of `messages`, and of the beginning of the policy's turn in a `prompt`."""
        return rendered(self.tokenizer, messages, tools, arguments=self.arguments, generation_prompt=prompt)


ADVICE = "write one that does to chat_template.jinja in the tokenizer's folder, from which servers load it too"


def _check_tools(name: str, tools: Any) -> None:
    if (
        not isinstance(tools, Sequence)
        or isinstance(tools, str)
        or not all(isinstance(tool, Mapping) for tool in tools)
    ):
        raise InvalidConfig(f"{name}: expected a sequence of JSON schemas, got {tools!r}")


def _make_room(known: dict[Any, Any]) -> None:
    """Forget all, if there is no room for another."""
    if len(known) >= KNOWN_SHAPES:
        known.clear()


def _following(new: Sequence[Message], tools: Tools) -> _Follow:
    return tuple(message["role"] for message in new), bool(tools)


def _thinks(turn: Message) -> bool:
    """Return whether a turn has thoughts: between tags, or as servers return them."""
    content = turn.get("content")
    return bool(turn.get("reasoning_content") or (isinstance(content, str) and "think>" in content))


def _without_content(message: Message) -> Message:
    """Return an earlier turn without the sampled text: templates refuse or remove parts of that."""
    return {**message, "content": "."} if message["role"] == "assistant" and message.get("content") else message


def _with_calls(messages: Sequence[Message], arguments: Any) -> list[Message]:
    """Return messages with tools' messages after a call of each, and named: some templates require both."""
    out: list[Message] = []
    turn = None
    for message in messages:
        if message["role"] == "assistant":
            turn = None if message.get("tool_calls") else len(out)
        elif message["role"] == "tool":
            message = {"name": "tool", "tool_call_id": CALL_ID, **message}  # noqa: PLW2901 (the completed one)
            if turn is not None:
                call = call_of(message["name"], arguments, message["tool_call_id"])
                out[turn] = {**out[turn], "tool_calls": [*out[turn].get("tool_calls", ()), call]}
        out.append(message)
    return out
