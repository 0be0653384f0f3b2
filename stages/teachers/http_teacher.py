"""HttpTeacher: an inference server as a teacher, over HTTP: vLLM, asked for the log-probabilities of a prompt.

One question is one attempt: how long it may take, and how often it is tried, says the `Teacher` stage. Knows no model.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..._pipeline.context import Worker
from ..._pipeline.errors import ProtocolMismatch
from ..._pipeline.extras import extra
from ..._schemas.config import check_url
from ..engines.backoff import Backoff, jitter
from ..teacher import TeacherEngine
from .candidates import TeacherCandidates

if TYPE_CHECKING:
    from ..engines.server_client import ServerClient

__all__ = ["HttpTeacher"]

PATH = "/v1/completions"

AT_START = Backoff(attempts=3)
"""How often a server is asked whether it has the model: an `OutsideServer` of the pipeline is ready by then."""

AT_START_S = 30.0
"""How long it may take to say so."""


class _Expected(msgspec.Struct, frozen=True):
    logprob: float


class _Choice(msgspec.Struct, frozen=True):
    prompt_logprobs: list[dict[int, _Expected] | None]
    """One a token of the prompt; None of the first. The token itself is among them, likely or not."""


class _Answer(msgspec.Struct, frozen=True):
    choices: list[_Choice]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpTeacher:
    """A recipe for a teacher at a vLLM server, whose log-probabilities are the model's own, at temperature 1."""

    url: str
    """Of the server, without a path: `http://127.0.0.1:8000`."""
    model: str
    """What the server calls the model."""
    tokenizer: Any
    """The model's tokenizer, or its `TokenizerIdentity`."""
    api_key: str | None = field(default=None, repr=False)
    """Sent as a bearer token."""

    def __post_init__(self) -> None:
        """Refuse what can never be asked.

        Raises:
            InvalidConfig: naming the field.
        """
        check_url(self.url, "HttpTeacher.url")

    @asynccontextmanager
    async def open(self, worker: Worker) -> AsyncGenerator[TeacherEngine]:
        """Connect, and make sure that the server knows the model.

        Raises:
            NobodyListens: nothing answers at `url`.
            EngineRefused: the server has another model.
            MissingExtra: aiohttp is not installed.
        """
        with extra("http", "HttpTeacher"):
            from ..engines.http_engine import check_model  # noqa: PLC0415 (describing a teacher does not need aiohttp)
            from ..engines.server_client import open_client  # noqa: PLC0415
        told = open_client(self.url, self.api_key, AT_START, request_timeout_s=AT_START_S, draw=jitter(worker))
        async with told as client:
            await check_model(client, self.model)
        once = Backoff(attempts=1)
        async with open_client(self.url, self.api_key, once, request_timeout_s=math.inf, draw=lambda: 0.0) as client:
            yield _Engine(self.model, client)


class _Engine:
    """See `TeacherEngine`."""

    def __init__(self, model: str, client: ServerClient) -> None:
        self._model = model
        self._client = client

    async def candidates(self, tokens: NDArray[np.int32], wanted: NDArray[np.bool_], top_k: int) -> TeacherCandidates:  # noqa: ARG002 (the server tells of every token)
        """See `TeacherEngine`.

        Raises:
            EngineRefused: the server will not: the sequence is too long, or top_k above its `--max-logprobs`.
            EngineFailed: it could not.
            NobodyListens: it is not there.
            ProtocolMismatch: it answered without the log-probabilities of the prompt.
        """
        asked = {"model": self._model, "prompt": tokens.tolist(), "max_tokens": 1, "prompt_logprobs": top_k}
        body = msgspec.json.encode(asked)
        answered = await self._client.retry(PATH, lambda: self._client.answer("POST", PATH, body))
        try:
            choice, *_ = msgspec.convert(answered, _Answer, strict=False).choices  # JSON's keys are text
        except (msgspec.ValidationError, ValueError) as error:
            raise ProtocolMismatch(f"expected prompt_logprobs from {self._client.url}{PATH}: {error}") from None
        rows = [row or {} for row in choice.prompt_logprobs]
        return TeacherCandidates.of([{index: told.logprob for index, told in row.items()} for row in rows])
