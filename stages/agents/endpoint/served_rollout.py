"""`ServedRollout`: one rollout behind the endpoint. Its calls become answers, each sampled once. Knows no HTTP."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import anyio
import anyio.to_thread
import msgspec
import numpy as np
from numpy.typing import NDArray

from ...._pipeline.errors import InvalidData
from ...._pipeline.util.exception_groups import unwrap_first
from ...._schemas import StopReason
from ...contracts.policies import Call
from ...contracts.sampling_params import SamplingParams
from ...tokenizers.chat_format import ChatFormat, Tools
from ...tokenizers.conversations import text_of
from ...tokenizers.messages import Message
from ...tokenizers.start_tokens import prompt_ids
from ...tokenizers.tool_calls import ToolCall, parse_turn
from ..agent_client import AgentClient, CallsUsedUp
from ..conversation_tree import BranchReason, CallPrompt, ConversationTree, KnownMessage
from .call_fields import choices_sampling

T = TypeVar("T")

Finish: TypeAlias = Literal["stop", "length", "tool_calls"]

MODEL = "policy"
"""Name of the model; requests may give any."""

MAX_CALLS = 256
"""Calls of a rollout at once; others wait."""

LONG_TEXT = 2**16
"""Bytes of messages, or of a text, that become tokens in a worker thread: at 2 µs a byte, they hold the loop for 0.1 s.
"""

ROLE_AND_CONTENT = 2
"""Fields."""

MAX_ANSWERS = 256
"""Answers of a rollout that a repeated request finds."""

FINAL = "No call is left in this rollout."
"""Answer once the calls of a rollout are used up: it has no call of a tool, so that the agent ends."""


class SamplesCalls(Protocol):
    """A client of a rollout, as the endpoint needs it; an `AgentClient`."""

    @property
    def sampling(self) -> SamplingParams:
        """Return the parameters of a call that brings none."""
        ...

    async def generate(self, prompt: NDArray[np.int32], sampling: SamplingParams | None = None) -> Call:
        """Return the completion of `prompt`; see `AgentClient.generate`."""
        ...

    def add_reward(self, value: float, call: str | None) -> None:
        """Add to the reward; see `AgentClient.reward`."""
        ...

    def another(self) -> AgentClient:
        """Return another client of the rollout; see `AgentClient.another`."""
        ...


class NamedCall(ToolCall, frozen=True, kw_only=True):
    """A call of a tool, with its id."""

    id: str


class Choice(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One completion of a call, as text and as a message."""

    call: Call | None
    """None for the final message of a rollout whose calls are used up."""
    text: str
    """The sampled text, without the end of it: a token, or a stop string."""
    stop: str | None = None
    """The stop string that ended it."""
    content: str
    reasoning: str | None = None
    calls: tuple[NamedCall, ...] = ()

    @property
    def tokens(self) -> list[int]:
        """Return what was sampled."""
        return [] if self.call is None else self.call.tokens.tolist()

    @property
    def finish(self) -> Finish:
        """Return the reason of the end."""
        if self.calls:
            return "tool_calls"
        return "length" if self.call is not None and self.call.stop_reason == StopReason.LENGTH else "stop"

    @property
    def message(self) -> dict[str, Any]:
        """Return the message of the assistant, as templates read it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return message


class Answer(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The completions of a call."""

    prompt: NDArray[np.int32]
    choices: tuple[Choice, ...]
    created: int

    @property
    def id(self) -> str:
        """Return the id of the first completion: its name for `reward`."""
        call = self.choices[0].call
        return "calls-used-up" if call is None else call.id

    @property
    def sampled_tokens(self) -> int:
        """Return the tokens of all completions."""
        return sum(len(choice.tokens) for choice in self.choices)


@dataclass(slots=True, eq=False)
class _Asked:
    """A request that is being answered, or was."""

    answer: Answer | None = None
    done: anyio.Event = field(default_factory=anyio.Event)
    delivered: bool = False


def _size(message: Message) -> int:
    """Return roughly the bytes of a message; most have a role and a content."""
    return len(message["content"]) if len(message) == ROLE_AND_CONTENT else len(msgspec.json.encode(message))


def _no_calls(_: str) -> tuple[()]:
    return ()


@dataclass(slots=True, eq=False)
class SharedState:
    """The state of a rollout that its clients share."""

    calls: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(MAX_CALLS))
    """Entered by each request for completions before its body is read: those of a flood wait unread."""
    failed: bool = False
    """True once a client was told that the engine failed, and to repeat its request."""


class ServedRollout:
    """The calls of one client of a rollout."""

    def __init__(
        self,
        rollout: SamplesCalls,
        chat: ChatFormat,
        *,
        url: str,
        shared: SharedState | None = None,
    ) -> None:
        self.key: str = secrets.token_urlsafe(24)
        """The secret of the client."""
        self.base_url: str = f"{url}/r/{self.key}/v1"
        """Of OpenAI's API, with the key in its path: a client that sends no key needs nothing else."""
        self.malformed_calls = 0
        """Calls of tools that could not be read, and are text."""
        self.chat = chat
        self._rollout = rollout
        self.shared: SharedState = shared or SharedState()
        """With the other clients of the rollout."""
        self._thread = anyio.CapacityLimiter(1)
        """Of long texts."""
        self._parser = chat.tool_calls or chat.tool_call_format or "hermes"
        self._tree = ConversationTree(chat)
        self.known: dict[bytes, KnownMessage] = {}
        """Messages that were read, by their JSON."""
        self._asked: OrderedDict[str, _Asked] = OrderedDict()
        self._named_calls = 0

    @property
    def branched(self) -> Mapping[BranchReason, int]:
        """Return the calls that began a branch, by reason."""
        return self._tree.branched

    @property
    def sampling(self) -> SamplingParams:
        """Return the parameters of a call that brings none."""
        return self._rollout.sampling

    def add_reward(self, value: float, call: str | None) -> None:
        """Add to the reward of the rollout, or of a call by its id.

        Raises:
            InvalidData: the value is not finite, or no call has this id.
            RolloutEnded: the rollout has ended.
        """
        try:
            self._rollout.add_reward(value, call)
        except ValueError as error:
            raise InvalidData(str(error)) from error

    def another(self) -> AgentClient:
        """Return another client of the rollout.

        Raises:
            RolloutEnded: the rollout has ended.
        """
        return self._rollout.another()

    async def prompt(self, messages: Sequence[Message], tools: Tools | None) -> CallPrompt:
        """Return the prompt of a call that is not sampled yet.

        Raises:
            InvalidData: the template refuses the messages, or they are nested too deeply.
        """
        try:
            nbytes = sum(map(_size, messages)) + (len(msgspec.json.encode(tools)) if tools else 0)
            return await self._tokenized(nbytes, partial(self._tree.prompt, messages, tools))
        except RecursionError:
            raise InvalidData("messages: expected JSON of less depth") from None

    async def encoded(self, text: str, *, start: bool = True) -> list[int]:
        """Return the tokens of a text, after those that `start` one."""
        tokenizer = self.chat.tokenizer
        encode = partial(prompt_ids, tokenizer, text) if start else partial(tokenizer.encode, text)
        return list(await self._tokenized(len(text), encode))

    async def _tokenized(self, nbytes: int, function: Callable[[], T]) -> T:
        if nbytes <= LONG_TEXT:
            return function()
        return await anyio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=self._thread)

    async def converse(
        self,
        messages: Sequence[Message],
        tools: Tools | None,
        sampling: SamplingParams,
        choices: int = 1,
        *,
        callable_tools: bool = True,
    ) -> Answer:
        """Return turns of the policy after `messages`, and record them.

        Raises:
            InvalidData: the template refuses the messages.
            CallRefused: the call is not sampled.
        """
        prompt = await self.prompt(messages, tools)

        def read(call: Call) -> Choice:
            text, stop = self._text(call, sampling.stop)
            parsed = parse_turn(text, self._parser if callable_tools else _no_calls, tools=tools or self.chat.tools)
            self.malformed_calls += parsed.malformed
            choice = Choice(
                call=call,
                text=text,
                stop=stop,
                content=parsed.content,
                reasoning=parsed.reasoning,
                calls=tuple(self._named(each) for each in parsed.calls),
            )
            self._tree.record(prompt, choice.message, call)
            return choice

        return await self._sampled(prompt.tokens, sampling, choices, read)

    async def complete(self, prompt: NDArray[np.int32], sampling: SamplingParams, choices: int = 1) -> Answer:
        """Return completions of the tokens `prompt`.

        Raises:
            CallRefused: the call is not sampled.
        """

        def read(call: Call) -> Choice:
            text, stop = self._text(call, sampling.stop)
            return Choice(call=call, text=text, stop=stop, content=text)

        return await self._sampled(prompt, sampling, choices, read)

    async def _sampled(
        self, prompt: NDArray[np.int32], sampling: SamplingParams, choices: int, read: Callable[[Call], Choice]
    ) -> Answer:
        found: dict[int, Choice] = {}

        async def sample(number: int, own: SamplingParams) -> None:
            found[number] = read(await self._rollout.generate(prompt, own))

        try:
            if choices == 1:
                await sample(0, sampling)
            else:
                with unwrap_first():
                    async with anyio.create_task_group() as tasks:
                        for number, own in enumerate(choices_sampling(sampling, choices)):
                            tasks.start_soon(sample, number, own)
        except CallsUsedUp:
            found = found or {0: Choice(call=None, text=FINAL, content=FINAL)}
        return Answer(prompt=prompt, choices=tuple(found[number] for number in sorted(found)), created=int(time.time()))

    def _text(self, call: Call, stops: Sequence[str]) -> tuple[str, str | None]:
        """Return the text of a completion, and the stop string that ended it."""
        text = text_of(self.chat.tokenizer, call)
        found = [(place, stop) for stop in stops if (place := text.find(stop)) >= 0]
        if not found:
            return text, None
        place, stop = min(found)
        return text[:place], stop

    def _named(self, call: ToolCall) -> NamedCall:
        """Return a call with an id that is new in this rollout, and as long as Mistral's template requires it."""
        self._named_calls += 1
        return NamedCall(name=call.name, arguments=call.arguments, id=f"t{self._named_calls:08d}")

    # -- repeated requests ---------------------------------------------------------------------------------------------

    async def once(self, request: str, sample: Callable[[], Awaitable[Answer]], *, repeated: bool) -> Answer:
        """Return the answer of an equal request that was `repeated`, or whose answer did not arrive; else sample it."""
        while (asked := self._asked.get(request)) is not None:
            if not repeated and (asked.answer is None or asked.delivered):
                break
            await asked.done.wait()
            if asked.answer is not None:
                return asked.answer
        own = self._asked[request] = _Asked()
        self._asked.move_to_end(request)
        if len(self._asked) > MAX_ANSWERS:
            self._asked.popitem(last=False)
        try:
            answer = own.answer = await sample()
        finally:
            own.done.set()
            if own.answer is None and self._asked.get(request) is own:
                del self._asked[request]
        return answer

    def deliver(self, request: str) -> None:
        """Note that the answer was written to the client."""
        if (asked := self._asked.get(request)) is not None:
            asked.delivered = True
