"""Sampling at an inference server over HTTP: vLLM, SGLang, or another that speaks OpenAI's completions and returns ids.

Prompts go as token ids, completions come as token ids, streamed, so that whoever stops listening has the server stop
sampling. What fails in passing is tried again; what the server refuses is told at once. Knows no model and no
environment; what each kind of server understands is in `inference_servers.py`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import anyio
import anyio.to_thread
import msgspec
import numpy as np
from numpy.typing import NDArray

from ..._pipeline.context import Worker, current
from ..._pipeline.errors import EngineRefused, PenstockError, ProtocolMismatch
from ..._pipeline.policy.shielded import shielded
from ..._pipeline.telemetry import get_logger
from ..training.checkpoint import FOLDER_SCHEME, latest_checkpoint, step_of
from .backoff import jitter
from .completion_stream import Events, StreamedCompletion
from .gate import GenerationGate, Reason
from .http_policy import HttpPolicy
from .inference_servers import SERVERS, SIGNS, Call, KnownServer
from .policies import Completion, check_request
from .server_client import RETRYABLE, RequestFailed, ServerClient, open_client
from .weight_files import check_weight_files

__all__ = ["HttpEngine", "check_model", "open_engine"]

log = get_logger("penstock.http_policy")

UNDO_S = 30.0
"""How long a server may take to sample again, once the pause that it was told of is given up."""

HURRIED_UNDO_S = 2.0
"""How long it may take where whoever asked for the pause was cancelled: a Ctrl-C is not held up."""

RETRYABLE_LOADING = RETRYABLE - {HTTPStatus.INTERNAL_SERVER_ERROR}
"""Statuses that say "not now" also where a 500 says "never": of files that cannot be loaded, and of unknown paths."""

SETTINGS_S = 5.0
"""How long a server may take to tell its settings, which are asked for the sake of a warning alone."""

UNKNOWN_PATH = {HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED}

T = TypeVar("T")


@asynccontextmanager
async def open_engine(policy: HttpPolicy, worker: Worker) -> AsyncGenerator[HttpEngine]:
    """Connect, make sure that the server knows the model, and ask which server it is where that is open.

    Raises:
        NobodyListens: nothing answers at the policy's URL.
        EngineRefused: the server has another model.
        InvalidConfig: `versions` is "asked", and this server cannot be asked.
    """
    async with open_client(
        policy.url, policy.api_key, policy.backoff, request_timeout_s=policy.request_timeout_s, draw=jitter(worker)
    ) as client:
        await check_model(client, policy.model)
        server = await _detected(client) if policy.server == "auto" else policy.server
        policy.check_versions(server)
        yield HttpEngine(policy, client, server)


async def check_model(client: ServerClient, name: str) -> None:
    """Make sure that the server has the model.

    Raises:
        EngineRefused: it has others.
    """
    listed = await client.retry("/v1/models", lambda: client.answer("GET", "/v1/models"))
    models = listed.get("data")
    known = [model.get("id") for model in models if isinstance(model, dict)] if isinstance(models, list) else []
    if name not in known:
        raise EngineRefused(f"expected {name!r} at {client.url}, got {known}")


async def _detected(client: ServerClient) -> KnownServer:
    """Return which server answers. One whose answers say nothing is another that speaks OpenAI's completions."""
    for sign in SIGNS:
        with suppress(EngineRefused, ProtocolMismatch):
            asked = partial(client.answer, "GET", sign.path)
            answer = await client.retry(sign.path, asked, retryable=RETRYABLE_LOADING)
            if sign.field in answer:
                log.info("server_detected", url=client.url, server=sign.server)
                return sign.server
    log.info("server_detected", url=client.url, server="openai")
    return "openai"


class HttpEngine:
    """A client of one server; see `Engine`. One event loop uses it."""

    def __init__(self, policy: HttpPolicy, client: ServerClient, server: KnownServer) -> None:
        """`server` is the one that answers, also where `policy` leaves it open."""
        self._policy = policy
        self._server = server
        self._dialect = SERVERS[server]
        self._client = client
        self._places = anyio.Semaphore(policy.concurrency)
        self._gate = GenerationGate()
        """Every attempt at a completion passes it."""
        self._one_at_a_time = anyio.Lock()
        """Held by whoever changes what the server does."""
        self._version = 0
        """Of the weights, as far as it was told here."""
        self._tempered = (
            self._dialect.tempered_logprobs if policy.tempered_logprobs is None else policy.tempered_logprobs
        )
        self._told_of_logprobs = False
        self._told_of_memory = False
        self._spoilt: str | None = None
        """Why nobody knows what the server's weights are; None while they are those of a version."""

    def __repr__(self) -> str:
        state = " and ".join(sorted(self._gate.closed_for)) or ("no_weights" if self._spoilt else "awake")
        return f"<HttpEngine {self._server} at {self._policy.url} {state}, version {self._version}>"

    # -- completions ---------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompts: Sequence[NDArray[np.int32]],
        *,
        max_completion_tokens: int,
        temperature: float = 1.0,
        greedy: bool = False,
    ) -> list[Completion]:
        """One completion a prompt, in order; see `Engine.generate`. Cancelled, it has the server stop sampling them.

        Raises:
            ValueError: a prompt is empty, or `max_completion_tokens` or `temperature` is not above 0.
            EngineRefused: the server will not sample this, or its weights could not be updated.
            EngineTimedOut: it took too long, at every attempt.
            EngineFailed: it failed, at every attempt.
            NobodyListens: it was not there, at any attempt.
            ProtocolMismatch: it answered with what is no completion, or with no token ids.
        """
        check_request(prompts, max_completion_tokens, temperature)
        body = {"max_tokens": max_completion_tokens, "temperature": 0.0 if greedy else temperature}
        with_logprobs = greedy or temperature == 1 or self._tempered
        completions: dict[int, Completion] = {}
        failures: list[Exception] = []

        async def complete(index: int, prompt: NDArray[np.int32]) -> None:
            try:
                async with self._places:
                    completed = await self._completed(body | {"prompt": prompt.tolist()})
                completions[index] = completed if with_logprobs else self._without_logprobs(completed)
            except Exception as error:  # noqa: BLE001 (raised below: a task group would wrap it)
                failures.append(error)
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for index, prompt in enumerate(prompts):
                tasks.start_soon(complete, index, prompt)
        if failures:
            raise failures[0]
        return [completions[index] for index in range(len(prompts))]

    def _without_logprobs(self, completion: Completion) -> Completion:
        """The server's are the model's own, and a completion's are those of the distribution that was sampled from."""
        if not self._told_of_logprobs:
            self._told_of_logprobs = True
            log.warning("logprobs_left_out", reason="temperature is not 1, and the server's are not tempered")
        return msgspec.structs.replace(completion, logprobs=None)

    async def _completed(self, body: dict[str, Any]) -> Completion:
        asked: dict[str, Any] = {"model": self._policy.model, "stream": True, "logprobs": 1}
        encoded = msgspec.json.encode(asked | self._dialect.sampling | body)

        async def attempt() -> Completion:
            await self._gate.opened()
            with self._gate.inside():
                self._check_weights()
                version = await self._version_now()
                return (await self._streamed(encoded, body["max_tokens"])).completion(version)

        completion = await self._client.retry("/v1/completions", attempt)
        current().metrics.total("rollout/tokens", len(completion.tokens))
        return completion

    async def _streamed(self, body: bytes, max_completion_tokens: int) -> StreamedCompletion:
        said, events = StreamedCompletion(max_completion_tokens), Events()
        async with self._client.stream("/v1/completions", body) as pieces:
            async for piece in pieces:
                for data in events.feed(piece):
                    said.take(data)
        if not said.done:
            raise RequestFailed(HTTPStatus.BAD_GATEWAY, "the stream ended before the completion did")
        return said

    def _check_weights(self) -> None:
        if self._spoilt is not None:
            raise EngineRefused(
                f"expected a server with the weights of a version, got {self!r}, for an update failed: {self._spoilt}; "
                f"call update_weights until it succeeds"
            )

    async def _version_now(self) -> int:
        """A completion that is begun now is sampled with weights of this version, or newer ones."""
        if self._policy.versions == "told" or self._dialect.version is None:
            return self._version
        told = (await self._client.answer("GET", self._dialect.version)).get("weight_version")
        noted = "0" if told is None or told == "default" else str(told)
        if not noted.isdecimal():
            raise ProtocolMismatch(f"expected a number as weight_version of {self._policy.url}, got {told!r}")
        return int(noted)

    # -- weights and memory --------------------------------------------------------------------------------------------

    async def update_weights(self, url: str, version: int) -> None:
        """Have the server load weights from a folder that it can read, `file:///folder`; see `Engine`.

        Of a WeightFolder it is the newest version, and of any other the folder as it is.

        Raises:
            EngineRefused: the server cannot, sleeps, or does not like the weights; or there is no such version, or a
                file of it is torn or missing: then the server was told nothing.
            PenstockError: it failed, or does not sample again. Unless it refused before it loaded anything, nobody
                knows then what its weights are, and completions are refused until an update succeeds.
        """
        update = self._can("update", self._dialect.update)
        if not url.startswith(f"{FOLDER_SCHEME}/"):
            raise EngineRefused(f"expected weights in a folder that the server can read, file:///…, got {url}")
        folder, found = await anyio.to_thread.run_sync(_newest, Path(url.removeprefix(FOLDER_SCHEME)), version)
        async with self._one_at_a_time:
            if "asleep" in self._gate.closed_for:
                raise EngineRefused(f"expected an engine that is awake, got {self!r}: call wake_up first")
            await anyio.to_thread.run_sync(check_weight_files, folder)
            async with self._held():
                calls = update(str(folder), found)
                if self._policy.versions == "asked" and self._dialect.set_version is not None:
                    calls.append(self._dialect.set_version(found))
                await self._load(calls)
                self._version = found

    async def _load(self, calls: list[Call]) -> None:
        """Have the server load weights. If that fails halfway, completions are refused until it succeeds."""
        untouched = self._spoilt is None and "no_weights" not in self._gate.closed_for
        await self._gate.close("no_weights")
        try:
            for call in calls:
                await self._tell(call, RETRYABLE_LOADING)
                untouched = False
            self._spoilt = None
        except BaseException as error:
            told = error.__cause__
            if not (untouched and isinstance(told, RequestFailed) and told.status in self._dialect.untouched):
                self._spoilt = str(error) or "it was given up on"
            raise
        finally:
            self._gate.open("no_weights")

    @asynccontextmanager
    async def _held(self) -> AsyncGenerator[None]:
        """Nothing is sampled within the body. Once it has ended well, failing to go on is a failure."""
        if "paused" in self._gate.closed_for:
            yield
            return
        await self._shut("updating", self._dialect.pause, self._dialect.resume)
        try:
            yield
            await self._tell(self._dialect.resume)
        except BaseException as error:
            await self._undo("updating", self._dialect.resume, error)
            raise
        self._gate.open("updating")

    async def pause(self) -> None:
        """Have the server sample nothing more; returns when what this engine asked for has come.

        What other clients of the server asked for is finished first by vLLM, and waits in SGLang.
        """
        pause = self._can("pause", self._dialect.pause)
        async with self._one_at_a_time:
            await self._shut("paused", pause, self._dialect.resume)

    async def resume(self) -> None:
        """End the pause."""
        async with self._one_at_a_time:
            if "paused" in self._gate.closed_for:
                await self._tell(self._dialect.resume)
                self._gate.open("paused")

    async def sleep(self) -> None:
        """Have the server give its memory back, until `wake_up`.

        Raises:
            EngineRefused: the server cannot, or says afterwards that it does not sleep.
        """
        sleep = self._can("sleep", self._dialect.sleep)
        async with self._one_at_a_time:
            if "asleep" not in self._gate.closed_for:
                await self._shut("asleep", sleep, self._dialect.wake_up)
                await self._warn_of_kept_memory()
                if not self._dialect.keeps_weights_asleep:
                    await self._gate.close("no_weights")

    async def _warn_of_kept_memory(self) -> None:
        """Tell of a vLLM without sleep mode, as on a CPU: it samples nothing, says that it sleeps, and keeps memory."""
        if self._dialect.settings is None or self._told_of_memory:
            return
        with anyio.move_on_after(SETTINGS_S), suppress(aiohttp.ClientError, OSError, RequestFailed, ProtocolMismatch):
            answer = await self._client.answer("GET", self._dialect.settings)
            if not _gives_memory_back(answer):
                self._told_of_memory = True
                log.warning("sleep_keeps_memory", url=self._policy.url, reason="sleep mode is not enabled there")

    async def wake_up(self) -> None:
        """Have the server take its memory back. Where it lost its weights, what is asked waits for `update_weights`."""
        async with self._one_at_a_time:
            if "asleep" in self._gate.closed_for:
                await self._tell(self._dialect.wake_up)
                self._gate.open("asleep")

    async def _shut(self, reason: Reason, call: Call | None, undo: Call | None) -> None:
        """Finish what was asked for, and tell the server; if that fails, all is as before."""
        if reason in self._gate.closed_for:
            return
        await self._gate.close(reason)
        try:
            await self._tell(call)
        except BaseException as error:
            await self._undo(reason, undo, error)
            raise

    async def _undo(self, reason: Reason, call: Call | None, after: BaseException) -> None:
        """After a failure, have the server sample again, if it is still there."""
        what = f"an answer of {self._policy.url}"
        try:
            await shielded(
                lambda: self._tell(call), what, after=after, timeout_s=UNDO_S, cancel_timeout_s=HURRIED_UNDO_S
            )
        except (PenstockError, TimeoutError) as error:
            log.warning("engine_not_resumed", url=self._policy.url, reason=str(error))
        finally:
            self._gate.open(reason)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _can(self, what: str, word: T | None) -> T:
        if word is None:
            raise EngineRefused(f"expected a server that can {what}, got {self!r}: say which `server` it is")
        return word

    async def _tell(self, call: Call | None, retryable: frozenset[int] = RETRYABLE) -> None:
        if call is None:
            return
        body = msgspec.json.encode(call.body)
        post = partial(self._client.answer, "POST", call.path, body)
        try:
            answer = await self._client.retry(call.path, post, retryable=retryable)
        except EngineRefused as error:
            if isinstance(error.__cause__, RequestFailed) and error.__cause__.status in UNKNOWN_PATH:
                error.add_note(f"{self._server} understands this where it was started with {self._dialect.needs}")
            raise
        if answer.get("success") is False:
            raise EngineRefused(f"{self._client.url}{call.path}: {answer.get('message')}")
        if call.confirmed_by is not None:
            await self._confirm(call.path, *call.confirmed_by)

    async def _confirm(self, asked: str, path: str, field: str) -> None:
        """Make sure that the server did what it said that it would."""
        answer = await self._client.retry(path, partial(self._client.answer, "GET", path))
        if answer.get(field) is not True:
            raise EngineRefused(
                f"expected {field} from {self._client.url}{path} after {asked}, got {answer}: "
                f"it answered {asked} and did nothing; start it with {self._dialect.needs}"
            )


def _newest(folder: Path, version: int) -> tuple[Path, int]:
    """Where the newest version in `folder` is, and which it is. Blocks."""
    newest = latest_checkpoint(folder)
    if newest is None:
        return folder, version
    found = step_of(newest)
    if found < version:
        raise EngineRefused(f"expected version {version} or newer in {folder}, got version {found}")
    return newest, found


def _gives_memory_back(settings: Mapping[str, Any]) -> bool:
    """Whether a server with these settings gives memory back when it sleeps; also where they do not say."""
    vllm = settings.get("vllm_config")
    model = vllm.get("model_config") if isinstance(vllm, dict) else None
    return not (isinstance(model, dict) and model.get("enable_sleep_mode") is False)
