"""HttpTeacher: a vLLM server as a teacher, by the log-probabilities of a prompt.

One request is one attempt: the `Teacher` stage has the timeout and the retries. Knows no model.
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

from ..._pipeline.errors import ProtocolMismatch
from ..._pipeline.graph.context import Worker
from ..._pipeline.util.extras import extra
from ..._schemas.config import check_url
from ..._schemas.conversion import decode_json
from ..contracts.candidates import TeacherCandidates
from ..http.bounded_response import bytes_of, parsed
from ..http.retry import Backoff, jitter
from .teacher import TeacherEngine

if TYPE_CHECKING:
    from ..http.server_client import ServerClient

PATH = "/v1/completions"

AT_START = Backoff(attempts=3)
"""Retries of the request for the list of models: an `OutsideServer` of the pipeline is ready by then."""

AT_START_TIMEOUT_S = 30.0
"""Bound on the time of that request."""


class _Expected(msgspec.Struct, frozen=True):
    logprob: float


class _ScoredChoice(msgspec.Struct, frozen=True):
    prompt_logprobs: list[dict[int, _Expected] | None]
    """One entry for each token of the prompt, None for the first. Each contains the token itself, likely or not."""


class _Response(msgspec.Struct, frozen=True):
    choices: list[_ScoredChoice]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpTeacher:
    """A picklable description of a teacher at a vLLM server, with log-probabilities at temperature 1."""

    url: str
    """URL of the server, without a path: `http://127.0.0.1:8000`."""
    model: str
    """Name of the model at the server."""
    tokenizer: Any
    """The model's tokenizer, or its `TokenizerIdentity`."""
    api_key: str | None = field(default=None, repr=False)
    """Sent as a bearer token."""

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            InvalidConfig: naming the field.
        """
        check_url(self.url, "HttpTeacher.url")

    @asynccontextmanager
    async def open(self, worker: Worker) -> AsyncGenerator[TeacherEngine]:
        """Connect, and check that the server has the model.

        Raises:
            NobodyListens: no server responds at `url`.
            EngineRefused: the server has another model.
            MissingExtra: aiohttp is not installed.
        """
        with extra("http", "HttpTeacher"):
            from ..engines.http_engine import check_model  # noqa: PLC0415 (describing a teacher does not need aiohttp)
            from ..http.server_client import open_client  # noqa: PLC0415
        opened = open_client(
            self.url, self.api_key, AT_START, request_timeout_s=AT_START_TIMEOUT_S, draw=jitter(worker)
        )
        async with opened as client:
            await check_model(client, self.model)
        once = Backoff(attempts=1)
        async with open_client(self.url, self.api_key, once, request_timeout_s=math.inf, draw=lambda: 0.0) as client:
            yield _HttpTeacherEngine(self.model, client)


class _HttpTeacherEngine:
    """See `TeacherEngine`."""

    def __init__(self, model: str, client: ServerClient) -> None:
        self._model = model
        self._client = client

    async def candidates(self, tokens: NDArray[np.int32], wanted: NDArray[np.bool_], top_k: int) -> TeacherCandidates:  # noqa: ARG002 (the server returns those of every token)
        """Return candidates; see `TeacherEngine.candidates`.

        Raises:
            EngineRefused: the sequence is too long for the server, or top_k above its `--max-logprobs`.
            EngineFailed: the server failed.
            NobodyListens: it could not be reached.
            ProtocolMismatch: its response lacks the log-probabilities of the prompt.
        """
        fields = {"model": self._model, "prompt": tokens.tolist(), "max_tokens": 1, "prompt_logprobs": top_k}
        body, longest = msgspec.json.encode(fields), bytes_of(len(tokens) * (top_k + 1))
        received = await self._client.retry(PATH, lambda: self._client.body("POST", PATH, body, longest=longest))
        try:
            return await parsed(received, _candidates_in)
        except (msgspec.DecodeError, ValueError) as error:
            raise ProtocolMismatch(f"expected prompt_logprobs from {self._client.url}{PATH}: {error}") from None


def _candidates_in(received: bytes) -> TeacherCandidates:
    choice, *_ = decode_json(received, _Response, strict=False).choices  # JSON's keys are text
    rows = [row or {} for row in choice.prompt_logprobs]
    return TeacherCandidates.of([{index: expected.logprob for index, expected in row.items()} for row in rows])
