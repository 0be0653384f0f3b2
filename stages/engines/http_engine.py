"""Sampling at an inference server over HTTP: vLLM, SGLang, or another with OpenAI's completions that returns ids.

Prompts are sent as token ids; completions are streamed as token ids, so that closing the stream makes the server stop
sampling. Temporary failures are retried; a rejection by the server raises at once. Knows no model and no environment;
`inference_servers.py` lists the requests of each kind of server.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal, TypeVar

import aiohttp
import anyio
import anyio.to_thread
import msgspec
import numpy as np
from numpy.typing import NDArray

from ..._pipeline.accounting.telemetry import get_logger
from ..._pipeline.errors import EngineRefused, PenstockError, ProtocolMismatch
from ..._pipeline.graph.context import current
from ..._pipeline.util.checkpoint import FOLDER_SCHEME, latest_checkpoint, step_of
from ..._pipeline.util.exception_groups import unwrap_first
from ..._pipeline.weights.shielded import shielded
from ..._pipeline.weights.weight_files import check_weight_files
from ..contracts.policies import Completion, check_prompts
from ..contracts.routed_experts import RoutedExperts
from ..contracts.sampling_params import SamplingParams
from ..http.bounded_response import RequestFailed, bytes_of, parsed
from ..http.completion_stream import Events, StreamedCompletion
from ..http.gate import GenerationGate, Reason
from ..http.routing_record import longest
from ..http.server_client import RETRYABLE, ServerClient
from .inference_servers import PROBES, SERVERS, KnownServer, ServerCall

log = get_logger("penstock.http_policy")

RESUME_TIMEOUT_S = 30.0
"""Bound on resuming a server after a failed pause or update."""

CANCELLED_RESUME_TIMEOUT_S = 2.0
"""The same bound where the caller was cancelled, so that Ctrl-C is not delayed."""

RETRYABLE_LOADING = RETRYABLE - {HTTPStatus.INTERNAL_SERVER_ERROR}
"""Temporary failures of a request that fails for good with 500: files that cannot be loaded, unknown paths."""

SETTINGS_TIMEOUT_S = 5.0
"""Bound on reading a server's settings: they serve a warning only."""

UNKNOWN_PATH = {HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED}

T = TypeVar("T")


async def check_model(client: ServerClient, name: str) -> None:
    """Check that the server has the model.

    Raises:
        EngineRefused: it has others.
    """
    listed = await client.retry("/v1/models", lambda: client.request_json("GET", "/v1/models"))
    models = listed.get("data")
    known = [model.get("id") for model in models if isinstance(model, dict)] if isinstance(models, list) else []
    if name not in known:
        raise EngineRefused(f"expected {name!r} at {client.url}, got {known}")


async def detected(client: ServerClient) -> KnownServer:
    """Return the kind of a server; `openai` if no probe succeeds."""
    for probe in PROBES:
        with suppress(EngineRefused, ProtocolMismatch):
            request = partial(client.request_json, "GET", probe.path)
            response = await client.retry(probe.path, request, retryable=RETRYABLE_LOADING)
            if probe.field in response:
                log.info("server_detected", url=client.url, server=probe.server)
                return probe.server
    log.info("server_detected", url=client.url, server="openai")
    return "openai"


class HttpEngine:
    """A client of one server; see `Engine`. One event loop uses it."""

    def __init__(
        self,
        client: ServerClient,
        server: KnownServer,
        *,
        model: str,
        concurrency: int,
        tempered_logprobs: bool | None,
        versions: Literal["engine", "server"],
        routed_experts: RoutedExperts | None,
    ) -> None:
        """Make an engine of a client of this kind of server; see the fields of `HttpPolicy`."""
        self._model = model
        self._versions = versions
        self._routed_experts = routed_experts
        self._server: KnownServer = server
        self._requests = SERVERS[server]
        self._client = client
        self._permits = anyio.Semaphore(concurrency)
        self._gate = GenerationGate()
        """Every attempt at a completion passes through it."""
        self._one_at_a_time = anyio.Lock()
        """Held while weights, memory or pauses of the server change."""
        self._version = 0
        """Version of the weights, as set by `update_weights` of this engine."""
        self._tempered = self._requests.tempered_logprobs if tempered_logprobs is None else tempered_logprobs
        self._warned_of_logprobs = False
        self._warned_of_memory = False
        self._update_error: str | None = None
        """Error that left the server's weights unknown; None while they are those of a version."""

    def __repr__(self) -> str:
        state = " and ".join(sorted(self._gate.closed_for)) or ("no_weights" if self._update_error else "awake")
        return f"<HttpEngine {self._server} at {self._client.url} {state}, version {self._version}>"

    # -- completions ---------------------------------------------------------------------------------------------------

    async def generate(self, prompts: Sequence[NDArray[np.int32]], sampling: SamplingParams) -> list[Completion]:
        """Return one completion for each prompt, in order; see `Engine.generate`. Cancellation stops the sampling.

        Raises:
            InvalidConfig: a prompt is empty, or the server has no parameter that `sampling` needs.
            EngineRefused: the server rejected the request, or its weights could not be updated.
            EngineTimedOut: it took too long at the last attempt.
            EngineFailed: it failed at the last attempt.
            NobodyListens: it could not be reached at the last attempt.
            ProtocolMismatch: the response is no completion, or has no token ids, or no experts where they are wanted.
        """
        check_prompts(prompts)
        self._requests.check(sampling, self._server, tempered=self._tempered)
        omitted = self._requests.other_logprobs(sampling, tempered=self._tempered)
        completions: dict[int, Completion] = {}

        async def complete(index: int, prompt: NDArray[np.int32]) -> None:
            body = self._requests.body(sampling.seeded_for(index))
            async with self._permits:
                completion = await self._complete(body, prompt, sampling)
            completions[index] = self._without_logprobs(completion, omitted) if omitted else completion

        with unwrap_first():
            async with anyio.create_task_group() as tasks:
                for index, prompt in enumerate(prompts):
                    tasks.start_soon(complete, index, prompt)
        return [completions[index] for index in range(len(prompts))]

    def _without_logprobs(self, completion: Completion, reason: str) -> Completion:
        """Remove log-probabilities that the server computed of another distribution than the trainer does."""
        if not self._warned_of_logprobs:
            self._warned_of_logprobs = True
            log.warning("logprobs_omitted", reason=reason)
        return msgspec.structs.replace(completion, logprobs=None)

    async def _complete(self, body: dict[str, Any], prompt: NDArray[np.int32], sampling: SamplingParams) -> Completion:
        streams, routing = self._routed_experts is None, dict(self._requests.routing or {})
        fields: dict[str, Any] = {"model": self._model, "stream": streams, "logprobs": 1, "prompt": prompt.tolist()}
        encoded = msgspec.json.encode(fields | body | ({} if streams else routing))

        async def attempt() -> Completion:
            await self._gate.opened()
            with self._gate.inside():
                self._check_weights()
                version = await self._version_now()
                if self._routed_experts is None:
                    return (await self._stream(encoded, sampling)).completion(version)
                return await self._answered(encoded, len(prompt), sampling, version, self._routed_experts)

        completion = await self._client.retry("/v1/completions", attempt)
        current().metrics.total("rollout/tokens", len(completion.tokens))
        return completion

    async def _stream(self, body: bytes, sampling: SamplingParams) -> StreamedCompletion:
        completion, events = (
            StreamedCompletion(sampling.max_completion_tokens, sampling.stop_ids, sampling.support),
            Events(),
        )
        longest = bytes_of(sampling.max_completion_tokens * (1 + sampling.support))
        async with self._client.stream("/v1/completions", body, longest=longest) as chunks:
            async for chunk in chunks:
                for data in events.feed(chunk):
                    completion.take(data)
                    if completion.cut:
                        return completion
        if not completion.done:
            raise RequestFailed(HTTPStatus.BAD_GATEWAY, "the stream ended before the completion did")
        return completion

    async def _answered(
        self, body: bytes, prompt: int, sampling: SamplingParams, version: int, shape: RoutedExperts
    ) -> Completion:
        """Return a completion with its experts, from an answer without a stream: vLLM's streams have none."""
        most = sampling.max_completion_tokens
        bound = bytes_of(most * (1 + sampling.support)) + longest(shape, prompt + most)
        async with self._client.stream("/v1/completions", body, longest=bound) as chunks:
            received = b"".join([chunk async for chunk in chunks])
        return await parsed(received, partial(_completion_of, prompt, sampling, version, shape))

    def _check_weights(self) -> None:
        if self._update_error is not None:
            raise EngineRefused(
                f"expected a server with the weights of a version, got {self!r}, because an update failed: "
                f"{self._update_error}; call update_weights until it succeeds"
            )

    async def _version_now(self) -> int:
        """Return the version of the weights; a completion that is begun now uses this version, or newer ones."""
        if self._versions == "engine" or self._requests.version is None:
            return self._version
        reported = (await self._client.request_json("GET", self._requests.version)).get("weight_version")
        version = "0" if reported is None or reported == "default" else str(reported)
        if not version.isdecimal():
            raise ProtocolMismatch(f"expected a number as weight_version of {self._client.url}, got {reported!r}")
        return int(version)

    # -- weights and memory --------------------------------------------------------------------------------------------

    async def update_weights(self, url: str, version: int) -> None:
        """Have the server load weights from a folder that it can read, `file:///folder`; see `Engine`.

        It loads the newest version of a WeightFolder, and any other folder as it is.

        Raises:
            EngineRefused: the server cannot update, sleeps, or rejects the weights; or there is no such version, or a
                file of it is torn or missing: then no request was sent.
            PenstockError: it failed, or does not resume. Unless it refused before it loaded a file, its weights are
                unknown then, and completions are refused until an update succeeds.
        """
        update = self._can("update", self._requests.update)
        if not url.startswith(f"{FOLDER_SCHEME}/"):
            raise EngineRefused(f"expected weights in a folder that the server can read, file:///…, got {url}")
        folder, found = await anyio.to_thread.run_sync(_newest, Path(url.removeprefix(FOLDER_SCHEME)), version)
        async with self._one_at_a_time:
            if "asleep" in self._gate.closed_for:
                raise EngineRefused(f"expected an engine that is awake, got {self!r}: call wake_up first")
            await anyio.to_thread.run_sync(check_weight_files, folder)
            async with self._paused():
                calls = update(str(folder), found)
                if self._versions == "server" and self._requests.set_version is not None:
                    calls.append(self._requests.set_version(found))
                await self._load(calls)
                self._version = found

    async def _load(self, calls: list[ServerCall]) -> None:
        """Have the server load weights. After a partial failure, completions are refused until it succeeds."""
        untouched = self._update_error is None and "no_weights" not in self._gate.closed_for
        await self._gate.close("no_weights")
        try:
            for call in calls:
                await self._send(call, RETRYABLE_LOADING)
                untouched = False
            self._update_error = None
        except BaseException as error:
            cause = error.__cause__
            if not (untouched and isinstance(cause, RequestFailed) and cause.status in self._requests.untouched):
                self._update_error = str(error) or "it was cancelled"
            raise
        finally:
            self._gate.open("no_weights")

    @asynccontextmanager
    async def _paused(self) -> AsyncGenerator[None]:
        """Pause sampling within the body. After a body without error, a failure to resume raises."""
        if "paused" in self._gate.closed_for:
            yield
            return
        await self._close("updating", self._requests.pause, self._requests.resume)
        try:
            yield
            await self._send(self._requests.resume)
        except BaseException as error:
            await self._reopen("updating", self._requests.resume, error)
            raise
        self._gate.open("updating")

    async def pause(self) -> None:
        """Pause the server; return when the requests of this engine are done.

        vLLM finishes the requests of other clients first; SGLang suspends them.
        """
        pause = self._can("pause", self._requests.pause)
        async with self._one_at_a_time:
            await self._close("paused", pause, self._requests.resume)

    async def resume(self) -> None:
        """End the pause."""
        async with self._one_at_a_time:
            if "paused" in self._gate.closed_for:
                await self._send(self._requests.resume)
                self._gate.open("paused")

    async def sleep(self) -> None:
        """Have the server release its memory until `wake_up`.

        Raises:
            EngineRefused: the server cannot, or reports afterwards that it does not sleep.
        """
        sleep = self._can("sleep", self._requests.sleep)
        async with self._one_at_a_time:
            if "asleep" not in self._gate.closed_for:
                await self._close("asleep", sleep, self._requests.wake_up)
                await self._warn_of_kept_memory()
                if not self._requests.keeps_weights_asleep:
                    await self._gate.close("no_weights")

    async def _warn_of_kept_memory(self) -> None:
        """Warn of a vLLM without sleep mode, as on a CPU: it pauses, reports that it sleeps, and keeps its memory."""
        if self._requests.settings is None or self._warned_of_memory:
            return
        with (
            anyio.move_on_after(SETTINGS_TIMEOUT_S),
            suppress(aiohttp.ClientError, OSError, RequestFailed, ProtocolMismatch),
        ):
            settings = await self._client.request_json("GET", self._requests.settings)
            if not _releases_memory(settings):
                self._warned_of_memory = True
                log.warning("sleep_keeps_memory", url=self._client.url, reason="sleep mode is not enabled there")

    async def wake_up(self) -> None:
        """Have the server allocate its memory. If it lost its weights, completions wait for `update_weights`."""
        async with self._one_at_a_time:
            if "asleep" in self._gate.closed_for:
                await self._send(self._requests.wake_up)
                self._gate.open("asleep")

    async def _close(self, reason: Reason, call: ServerCall | None, undo: ServerCall | None) -> None:
        """Close the gate, wait for requests in flight, and send `call`; on failure, send `undo` and reopen the gate."""
        if reason in self._gate.closed_for:
            return
        await self._gate.close(reason)
        try:
            await self._send(call)
        except BaseException as error:
            await self._reopen(reason, undo, error)
            raise

    async def _reopen(self, reason: Reason, call: ServerCall | None, after: BaseException) -> None:
        """After a failure, resume the server if it can be reached, and open the gate."""
        what = f"a response of {self._client.url}"
        try:
            await shielded(
                lambda: self._send(call),
                what,
                after=after,
                timeout_s=RESUME_TIMEOUT_S,
                cancel_timeout_s=CANCELLED_RESUME_TIMEOUT_S,
            )
        except (PenstockError, TimeoutError) as error:
            log.warning("engine_not_resumed", url=self._client.url, reason=str(error))
        finally:
            self._gate.open(reason)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _can(self, what: str, request: T | None) -> T:
        if request is None:
            raise EngineRefused(f"expected a server that can {what}, got {self!r}: set `server` to its kind")
        return request

    async def _send(self, call: ServerCall | None, retryable: frozenset[int] = RETRYABLE) -> None:
        if call is None:
            return
        body = msgspec.json.encode(call.body)
        post = partial(self._client.request_json, "POST", call.path, body)
        try:
            response = await self._client.retry(call.path, post, retryable=retryable)
        except EngineRefused as error:
            if isinstance(error.__cause__, RequestFailed) and error.__cause__.status in UNKNOWN_PATH:
                error.add_note(f"{self._server} has this path if it is started with {self._requests.needs}")
            raise
        if response.get("success") is False:
            raise EngineRefused(f"{self._client.url}{call.path}: {response.get('message')}")
        if call.confirmed_by is not None:
            await self._confirm(call.path, *call.confirmed_by)

    async def _confirm(self, request: str, path: str, field: str) -> None:
        """Check that the server carried out `request`."""
        response = await self._client.retry(path, partial(self._client.request_json, "GET", path))
        if response.get(field) is not True:
            raise EngineRefused(
                f"expected {field} from {self._client.url}{path} after {request}, got {response}: "
                f"it accepted {request} without effect; start it with {self._requests.needs}"
            )


def _completion_of(
    prompt: int, sampling: SamplingParams, version: int, shape: RoutedExperts, received: bytes
) -> Completion:
    """Return the completion of an answer, with its experts.

    Raises:
        ProtocolMismatch: it is no whole completion, or has no such experts.
    """
    answer = StreamedCompletion(sampling.max_completion_tokens, sampling.stop_ids, sampling.support)
    answer.take(received)
    if not answer.done or answer.routing is None:
        missing = "the experts of its tokens (routed_experts)" if answer.done else "a finish_reason"
        raise ProtocolMismatch(
            f"expected a completion with {missing}, got none: start the server with --enable-return-routed-experts"
        )
    completion = answer.completion(version)
    known = answer.routing.decode(shape, prompt + answer.arrived)
    experts = np.zeros((prompt + len(completion.tokens), *known.shape[1:]), known.dtype)
    experts[:-1] = known[: len(experts) - 1]
    return msgspec.structs.replace(completion, routed_experts=experts)


def _newest(folder: Path, version: int) -> tuple[Path, int]:
    """Return the path of the newest version in `folder`, and its number. Blocks."""
    newest = latest_checkpoint(folder)
    if newest is None:
        return folder, version
    found = step_of(newest)
    if found < version:
        raise EngineRefused(f"expected version {version} or newer in {folder}, got version {found}")
    return newest, found


def _releases_memory(settings: Mapping[str, Any]) -> bool:
    """Return whether a server with these settings releases memory when it sleeps; True if they do not say."""
    vllm = settings.get("vllm_config")
    model = vllm.get("model_config") if isinstance(vllm, dict) else None
    return not (isinstance(model, dict) and model.get("enable_sleep_mode") is False)
