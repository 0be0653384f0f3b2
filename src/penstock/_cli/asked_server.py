"""Requests to an inference server for `penstock doctor --endpoint`, and its answers as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from .._pipeline.errors import ProtocolMismatch
from .._schemas.conversion import decode_json
from .._schemas.errors import UNREADABLE
from .._stages.http.bounded_response import LONGEST_ANSWER, RequestFailed
from .._stages.http.completion_stream import Events, Logprob, TokenId
from .._stages.http.server_client import ServerClient

MODELS, CHAT, TEXT = "/v1/models", "/v1/chat/completions", "/v1/completions"
TOKENS = "/inference/v1/generate"

ABSENT = {HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED}
"""vLLM answers 403 at paths that were not enabled when it was started."""

T = TypeVar("T")


class Differs(Exception):
    """The server does something else than a trainer needs."""

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(cause)
        self.remedy = remedy


class NotAsked(Exception):
    """The server has nothing that could be compared."""


NO_IDS = Differs(
    "the answers have no token ids: text would be tokenized again, into other tokens than were sampled",
    "use a server with return_token_ids, such as vLLM 0.10.2 or later, or the endpoint of penstock",
)


class _Model(msgspec.Struct):
    id: str
    max_model_len: float | None = None


class _Models(msgspec.Struct):
    data: Annotated[list[_Model], msgspec.Meta(min_length=1)]


class _Read(msgspec.Struct):
    logprob: Logprob


class _Logprobs(msgspec.Struct):
    token_logprobs: list[Logprob] | None = None
    content: list[_Read] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None
    prompt_logprobs: list[dict[str, _Read] | None] | None = None
    logprobs: _Logprobs | None = None
    text: str | None = None
    message: dict[str, Any] | None = None
    finish_reason: str | None = None


class _Part(msgspec.Struct):
    """An event of a stream."""

    choices: list[_Choice] = []


class _Answer(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    prompt_token_ids: list[TokenId] | None = None


class ChoiceInIds(NamedTuple):
    """One choice of an answer."""

    tokens: list[int]
    logprobs: list[float] | None
    text: str
    finish: str | None
    message: Mapping[str, Any]


class AnswerInIds(NamedTuple):
    """The answer to a request for completions."""

    prompt: list[int]
    choices: list[ChoiceInIds]

    @property
    def first(self) -> ChoiceInIds:
        """Return the first choice."""
        return self.choices[0]


class AskedServer:
    """A server under examination."""

    def __init__(self, client: ServerClient, model: str, longest: int | None) -> None:
        self._client = client
        self._model = model
        self.longest: int | None = longest
        """Tokens of a prompt and its completion, if the server tells."""

    @classmethod
    async def of(cls, client: ServerClient) -> AskedServer:
        """Ask a server for its first model.

        Raises:
            PenstockError: it does not answer, refuses, or answers with something else.
        """
        received = await client.retry(MODELS, lambda: client.body("GET", MODELS))
        try:
            model = decode_json(received, _Models).data[0]
        except UNREADABLE as error:
            raise ProtocolMismatch(
                f"expected a list of models from {client.url}{MODELS}, got {received[:200]!r}: {error}"
            ) from None
        longest = model.max_model_len
        return cls(client, model.id, int(longest) if longest is not None and longest >= 1 else None)

    async def post(self, path: str, **fields: Any) -> None:
        """Send a request, and check that its answer is an object."""
        await self._asked(path, dict[str, Any], fields)

    async def _asked(self, path: str, kind: type[T], fields: Mapping[str, Any]) -> T:
        body = msgspec.json.encode({"model": self._model, **fields})
        return decode_json(await self._client.body("POST", path, body), kind)

    async def chat(self, messages: Sequence[Any], **fields: Any) -> AnswerInIds:
        """Return turns after `messages`."""
        return _answer(await self._asked(CHAT, _Answer, {"messages": messages, "return_token_ids": True, **fields}))

    async def complete(self, prompt: str | Sequence[int], **fields: Any) -> AnswerInIds:
        """Return what follows a text, or tokens."""
        return _answer(await self._asked(TEXT, _Answer, {"prompt": prompt, "return_token_ids": True, **fields}))

    async def generate(self, tokens: Sequence[int], **sampling: Any) -> list[int] | None:
        """Return the tokens that follow tokens; None if the server has no such path."""
        try:
            answer = await self._asked(TOKENS, _Answer, {"token_ids": tokens, "sampling_params": sampling})
        except RequestFailed as error:
            if error.status in ABSENT:
                return None
            raise
        if answer.choices[0].token_ids is None:
            raise NO_IDS
        return answer.choices[0].token_ids

    async def streamed(self, messages: Sequence[Any], **fields: Any) -> list[int]:
        """Return the tokens of a turn that is streamed."""
        given = {"model": self._model, "messages": messages, "return_token_ids": True, "stream": True, **fields}
        events = Events()
        tokens: list[int] = []
        async with self._client.stream(CHAT, msgspec.json.encode(given), longest=LONGEST_ANSWER) as chunks:
            async for chunk in chunks:
                parts = [decode_json(data, _Part) for data in events.feed(chunk) if data != b"[DONE]"]
                tokens += [token for part in parts for choice in part.choices for token in choice.token_ids or ()]
        return tokens

    async def raw_logprobs(self, tokens: Sequence[int]) -> list[float] | None:
        """Return the model's log-probability of each token but the first, at temperature 1; None if it has none."""
        try:
            asked = {"prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
            answer = await self._asked(TEXT, _Answer, asked)
        except RequestFailed:
            return None
        found = answer.choices[0].prompt_logprobs
        if not found:
            return None
        if len(found) != len(tokens):
            raise ProtocolMismatch(f"expected log-probabilities of {len(tokens)} tokens of a prompt, got {len(found)}")
        return [(each or {})[str(token)].logprob for token, each in zip(tokens[1:], found[1:], strict=True)]


def _answer(found: _Answer) -> AnswerInIds:
    choices = sorted(found.choices, key=lambda choice: choice.index)
    prompt = found.prompt_token_ids or choices[0].prompt_token_ids
    if prompt is None:
        raise NO_IDS
    return AnswerInIds(prompt, [_sampled(choice) for choice in choices])


def _sampled(choice: _Choice) -> ChoiceInIds:
    if choice.token_ids is None:
        raise NO_IDS
    logprobs = choice.logprobs or _Logprobs()
    values = logprobs.token_logprobs
    if values is None and logprobs.content is not None:
        values = [each.logprob for each in logprobs.content]
    message = choice.message or {}
    text = choice.text or str(message.get("content") or "")
    return ChoiceInIds(choice.token_ids, values, text, choice.finish_reason, message)
