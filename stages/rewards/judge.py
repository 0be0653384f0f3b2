"""`Judge`: a language model at an OpenAI-compatible server reads a completion and gives it a number.

Equal requests are sent once: their scores are cached by a hash of the request. Describing a judge needs no HTTP client;
`open` imports it.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio
import msgspec

from ..._pipeline.errors import InvalidConfig, MissingColumn, ProtocolMismatch, UnreadableScore
from ..._pipeline.graph.context import current
from ..._pipeline.util.extras import extra
from ..._pipeline.workers.call_process import Callee, CallProcesses
from ..._schemas.config import check_url, nearest
from ..._schemas.conversion import decode_json
from ..._schemas.numbers import normalize_counts
from ..contracts.threads import Threads
from ..http.bounded_response import bytes_of
from ..http.retry import Backoff, jitter
from . import pattern_process
from .pattern_process import Found, last_match
from .reward_functions import RewardComponent
from .reward_input import Messages, RewardInput

if TYPE_CHECKING:
    from ..http.server_client import ServerClient

PATH = "/v1/chat/completions"

LAST_NUMBER = r"[-+]?\d+(?:\.\d+)?"
"""With `parse`, the last match counts."""

READING = 8
"""Responses that are read at a time, in threads."""

CALLEE = Callee(pattern_process.__name__, "the judge's pattern", "penstock")

MakePrompt: TypeAlias = Callable[[RewardInput], str | Messages]
Parse: TypeAlias = Callable[[str], float]


@dataclass(frozen=True, slots=True)
class Judge(RewardComponent):
    r"""The number that a language model at a server answers with. Needs the extra `http`.

    >>> Judge(
    ...     "http://127.0.0.1:8000",
    ...     "judge-7b",
    ...     "Question: {prompt} Answer: {completion} Rate the answer from 0 to 10, as 'Score: 7'.",
    ...     parse=r"Score: (\d+)",
    ...     weight=0.1,
    ... ).name
    'judge'

    A temporary failure of the server is retried within `reward_timeout_s`; a response without a number is a failure of
    the completion.

    Raises:
        InvalidConfig: the URL, the template or the pattern does not fit.
    """

    url: str
    """URL of the server, without a path."""
    model: str
    """Name of the model at the server."""
    prompt: str | MakePrompt
    """The request: a template with `{completion}`, `{prompt}` and columns of the row, or a function that returns text
    or messages."""
    parse: str | Parse = LAST_NUMBER
    """Reads the number: a regular expression whose last match counts, its first group where it has one; or a function
    of the response. An expression of yours runs in a process of its own until `reward_timeout_s`, a function in a
    thread. By default the last number in it."""
    api_key: str | None = field(default=None, repr=False, kw_only=True)
    """Sent as a bearer token."""
    request: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0}, kw_only=True)
    """Further fields of the request."""
    cached: int = field(default=4096, kw_only=True)
    """Scores that are remembered; those that were not used for longest are forgotten."""
    backoff: Backoff = field(default_factory=Backoff, kw_only=True)
    """Number of attempts after temporary failures, and the pauses between them."""
    reward_timeout_s: float = field(default=60.0, kw_only=True)

    def __post_init__(self) -> None:
        """Check the options."""
        RewardComponent.__post_init__(self)
        check_url(self.url, "Judge.url")
        normalize_counts(self, "cached")
        if isinstance(self.prompt, str) and "completion" not in _fields(self.prompt):
            raise InvalidConfig(f"Judge.prompt: expected a template with {{completion}}, got {self.prompt!r}")
        if isinstance(self.parse, str):
            _check_pattern(self.parse)

    def default_name(self) -> str:
        """Return "judge"."""
        return "judge"

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[Callable[[RewardInput], Awaitable[float]]]:
        """Open a session of HTTP requests.

        Raises:
            MissingExtra: aiohttp is not installed.
        """
        with extra("http", "Judge"):
            from ..http.server_client import open_client  # noqa: PLC0415 (describing a judge does not need aiohttp)
        draw = jitter(current().worker)
        async with open_client(
            self.url, self.api_key, self.backoff, request_timeout_s=self.reward_timeout_s, draw=draw
        ) as client:
            requests = _Requests(self, client)
            try:
                await requests.open()
                yield requests.score
            finally:
                await requests.close()

    def request_of(self, completion: RewardInput) -> bytes:
        """Return the request about a completion, encoded.

        Raises:
            MissingColumn: the template names a column that the row does not have.
        """
        content = self._filled(self.prompt, completion) if isinstance(self.prompt, str) else self.prompt(completion)
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        return msgspec.json.encode({"model": self.model, "messages": messages, **self.request})

    def _filled(self, template: str, completion: RewardInput) -> str:
        values = completion.row | {"prompt": completion.prompt_text, "completion": completion.text}
        if missing := sorted(_fields(template) - values.keys()):
            raise MissingColumn(
                f"{self.name}: expected the data to have a column {missing[0]!r}, which the template names, got rows "
                f"with {sorted(completion.row)}{nearest(missing[0], values)}"
            )
        return template.format_map(values)


class _Requests:
    """The requests of a running judge, and the cache of its scores."""

    def __init__(self, judge: Judge, client: ServerClient) -> None:
        self._judge = judge
        self._processes = CallProcesses(CALLEE)
        self._threads = Threads(READING)
        self._client = client
        self._scores: OrderedDict[bytes, float] = OrderedDict()
        """By the hash of the request; the last used are at the end."""
        self._asking: dict[bytes, anyio.Event] = {}
        """Requests under way, each set when it has ended."""

    async def score(self, completion: RewardInput) -> float:
        """Return the score of `completion`, from the cache if it has it."""
        request = self._judge.request_of(completion)
        key = hashlib.sha256(request).digest()
        while key in self._asking:
            await self._asking[key].wait()
        if key in self._scores:
            current().metrics.total(f"rewards/{self._judge.name}/cached")
            self._scores.move_to_end(key)
            return self._scores[key]
        ended = self._asking[key] = anyio.Event()
        try:
            score = await self._score_in(await self._response(request))
        finally:
            del self._asking[key]
            ended.set()
        self._remember(key, score)
        return score

    def _remember(self, key: bytes, score: float) -> None:
        self._scores[key] = score
        if len(self._scores) > self._judge.cached:
            self._scores.popitem(last=False)

    async def _response(self, request: bytes) -> str:
        asked = self._judge.request.get("max_tokens") or self._judge.request.get("max_completion_tokens")
        longest = bytes_of(asked if isinstance(asked, int) else 0)
        ask = partial(self._client.request_json, "POST", PATH, request, longest=longest)
        response = await self._client.retry(PATH, ask)
        try:
            return str(response["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError):
            raise ProtocolMismatch(
                f"{self._judge.url}{PATH}: expected choices[0].message.content, got {str(response)[:200]}"
            ) from None

    async def open(self) -> None:
        """Start the first process, where there will be one."""
        if isinstance(self._judge.parse, str) and self._judge.parse != LAST_NUMBER:
            async with self._processes.borrowed():
                pass

    async def close(self) -> None:
        """End the threads and processes that read responses."""
        self._threads.close()
        await self._processes.close()

    async def _score_in(self, response: str) -> float:
        """Return the number in the text of a response.

        Raises:
            UnreadableScore: it has no number.
        """
        parse = self._judge.parse
        if not isinstance(parse, str):
            return float(await self._threads.call(partial(parse, response)))
        try:
            return float(await self._last_match(parse, response) or "")
        except ValueError:
            raise UnreadableScore(
                f"expected a number by {parse!r} in the judge's response, got {response[-200:]!r}"
            ) from None

    async def _last_match(self, pattern: str, response: str) -> str | None:
        # The time of our own pattern grows with the text, and no faster; that of a user's has no bound.
        if pattern == LAST_NUMBER:
            found: str | None = await self._threads.call(partial(last_match, pattern, response))
            return found
        async with self._processes.borrowed() as process:
            reply = await process.ask(pattern, response)
        return decode_json(reply, Found).number


def _fields(template: str) -> set[str]:
    """Return the names of the fields of a template.

    Raises:
        InvalidConfig: it is no template.
    """
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise InvalidConfig(f"Judge.prompt: expected a template with {{completion}}, got {error}") from None
    return {re.split(r"[.\[]", name)[0] for name in names}


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise InvalidConfig(f"Judge.parse: expected a regular expression, got {pattern!r}: {error}") from None
