"""Requests to an inference server for `penstock doctor --endpoint`, and its answers as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from .._stages.http.bounded_response import RequestFailed, bytes_of
from .._stages.http.completion_stream import Events
from .._stages.http.server_client import ServerClient

CHAT, TEXT, TOKENS = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"

ABSENT = {HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED}
"""vLLM answers 403 at paths that were not enabled when it was started."""

LONGEST = bytes_of(2**18)


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
            PenstockError: it does not answer, or refuses.
        """
        response = await client.retry("/v1/models", lambda: client.request_json("GET", "/v1/models"))
        listed = response.get("data") or [{}]
        return cls(client, str(listed[0].get("id")), listed[0].get("max_model_len"))

    async def post(self, path: str, **fields: Any) -> dict[str, Any]:
        """Return the JSON of an answer."""
        body = msgspec.json.encode({"model": self._model, **fields})
        return await self._client.request_json("POST", path, body, longest=LONGEST)

    async def chat(self, messages: Sequence[Any], **fields: Any) -> AnswerInIds:
        """Return turns after `messages`."""
        return _answer(await self.post(CHAT, messages=messages, return_token_ids=True, **fields))

    async def complete(self, prompt: str | Sequence[int], **fields: Any) -> AnswerInIds:
        """Return what follows a text, or tokens."""
        return _answer(await self.post(TEXT, prompt=prompt, return_token_ids=True, **fields))

    async def generate(self, tokens: Sequence[int], **sampling: Any) -> list[int] | None:
        """Return the tokens that follow tokens; None if the server has no such path."""
        try:
            answer = await self.post(TOKENS, token_ids=tokens, sampling_params=sampling)
        except RequestFailed as error:
            if error.status in ABSENT:
                return None
            raise
        return list(answer["choices"][0]["token_ids"])

    async def streamed(self, messages: Sequence[Any], **fields: Any) -> list[int]:
        """Return the tokens of a turn that is streamed."""
        given = {"model": self._model, "messages": messages, "return_token_ids": True, "stream": True, **fields}
        events, found = Events(), []
        async with self._client.stream(CHAT, msgspec.json.encode(given), longest=LONGEST) as chunks:
            async for chunk in chunks:
                found += [msgspec.json.decode(data) for data in events.feed(chunk) if data != b"[DONE]"]
        choices = [choice for each in found for choice in each.get("choices", ())]
        return [token for choice in choices for token in choice.get("token_ids") or ()]

    async def raw_logprobs(self, tokens: Sequence[int]) -> list[float] | None:
        """Return the model's log-probability of each token but the first, at temperature 1; None if it has none."""
        try:
            answer = await self.post(TEXT, prompt=tokens, max_tokens=1, temperature=0, prompt_logprobs=0)
        except RequestFailed:
            return None
        found = answer["choices"][0].get("prompt_logprobs")
        if not found:
            return None
        return [each[str(token)]["logprob"] for token, each in zip(tokens[1:], found[1:], strict=True)]


def _answer(found: Mapping[str, Any]) -> AnswerInIds:
    choices = sorted(found["choices"], key=lambda choice: choice["index"])
    prompt = found.get("prompt_token_ids") or choices[0].get("prompt_token_ids")
    if prompt is None or any(choice.get("token_ids") is None for choice in choices):
        raise NO_IDS
    return AnswerInIds(list(prompt), [_sampled(choice) for choice in choices])


def _sampled(choice: Mapping[str, Any]) -> ChoiceInIds:
    logprobs = choice.get("logprobs") or {}
    values = logprobs.get("token_logprobs")
    if values is None and logprobs.get("content") is not None:
        values = [each["logprob"] for each in logprobs["content"]]
    message = choice.get("message") or {}
    text = choice.get("text", message.get("content")) or ""
    return ChoiceInIds(list(choice["token_ids"]), values, text, choice.get("finish_reason"), message)
