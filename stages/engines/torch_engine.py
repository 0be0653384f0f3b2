"""`TorchEngine`: samples a torch model in this process.

Requests that several rollouts make in the same tick are sampled as one batch; those that arrive while it runs form the
next one. A batch runs in a worker thread, with the weights that it began with; or, with updates in flight, every token
with the newest. If the model can map the publisher's memory, its tensors are views of it: there is no second copy.
Knows the model only by `CausalModel`, and no environment.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import NamedTuple

import anyio
import anyio.to_thread
import numpy as np
import torch
from anyio.abc import TaskGroup, TaskStatus
from anyio.lowlevel import checkpoint
from numpy.typing import NDArray
from torch import Tensor

from ..._pipeline.errors import EngineRefused, InvalidConfig, PeerLost
from ..._pipeline.graph.context import current
from ..._pipeline.weights.weights import NO_VERSION
from ..._schemas import StopReason
from ..training.causal_model import CausalModel
from .gate import GenerationGate
from .policies import Completion, Tokenizer, check_prompts
from .sampling_params import SamplingParams, as_seed
from .stop_strings import StopStrings
from .torch_folder_subscriber import Subscriber, subscriber
from .torch_sampling import SampledTokens, SamplingBatch, SamplingRequest

ATTEMPTS = 3
"""Attempts for a batch; more than one only if the publisher overwrites its weights after a timeout."""


class _Row(NamedTuple):
    """One prompt of a call of `generate`."""

    request: SamplingRequest
    result: asyncio.Future[Completion]
    """Cancelled with the call."""


class TorchEngine:
    """Samples requests in batches; see `Engine`. One event loop uses it."""

    def __init__(
        self,
        model: CausalModel,
        tasks: TaskGroup,
        eos_id: int,
        seed: int,
        max_rows: int,
        *,
        in_flight: bool = False,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._model = model
        self._tasks = tasks
        """Runs the task that holds the subscription."""
        self._weights: Subscriber | None = None
        self._follows = False
        """Whether every batch loads newer weights by itself; else `update_weights` does."""
        self._eos_id = eos_id
        self._seed = seed
        self._seeded_for: int | None = None
        """The version that the generator was seeded for last."""
        self._generator: torch.Generator | None = None
        """Made with the first batch, on the model's device, which is unknown before if the model was made on `meta`."""
        self._max_rows = max_rows
        self._in_flight = in_flight
        self._tokenizer = tokenizer
        """Finds stop strings."""
        self._pending: deque[_Row] = deque()
        """Rows that are not being sampled yet, in the order of the requests."""
        self._requested = anyio.Event()
        """Set while rows may be pending."""
        self._closed = False
        """Read by the worker thread before each token."""
        self._gate = GenerationGate()
        """Every batch passes through it."""
        self._one_at_a_time = anyio.Lock()
        """Held while the weights or their memory change."""
        self._released: dict[torch.UntypedStorage, int] = {}
        """Memory of the model that `sleep` released, with its size in bytes."""
        self._version = 0

    def __repr__(self) -> str:
        state = " and ".join(sorted(self._gate.closed_for)) or "awake"
        return f"<TorchEngine {state}, version {self._version}: {len(self._pending)} rows waiting>"

    async def generate(self, prompts: Sequence[NDArray[np.int32]], sampling: SamplingParams) -> list[Completion]:
        """Return one completion for each prompt, in order; see `Engine.generate`.

        Raises:
            ValueError: a prompt is empty.
            InvalidConfig: there are stop strings, and no tokenizer.
            anyio.ClosedResourceError: the policy was closed before the end.
        """
        check_prompts(prompts)
        self._check_open()
        if not prompts:
            return []
        loop = asyncio.get_running_loop()
        rows = [
            _Row(self._request(prompt, sampling.seeded_for(index)), loop.create_future())
            for index, prompt in enumerate(prompts)
        ]
        self._pending.extend(rows)
        self._requested.set()
        return await asyncio.gather(*[row.result for row in rows])

    def _request(self, prompt: NDArray[np.int32], sampling: SamplingParams) -> SamplingRequest:
        stop = StopStrings(self._text_of(sampling), sampling.stop) if sampling.stop else None
        return SamplingRequest(np.asarray(prompt, np.int32), sampling, stop)

    def _text_of(self, sampling: SamplingParams) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidConfig(
                f"SamplingParams.stop: expected a TorchPolicy with a tokenizer, which makes text of tokens, got none "
                f"for {list(sampling.stop)}: use TorchPolicy(…, tokenizer=…)"
            )
        return self._tokenizer

    async def serve(self) -> None:
        """Sample the requests, batch after batch, until cancelled."""
        while True:
            await self._requested.wait()
            await self._tick()
            batch = self._take()
            if not self._pending:
                self._requested = anyio.Event()
            if batch:
                await self._complete(batch)

    async def _tick(self) -> None:
        """Yield until no other task adds a request."""
        known = -1
        while len(self._pending) != known:
            known = len(self._pending)
            await checkpoint()

    def _take(self) -> list[_Row]:
        """Return the next rows, without those of cancelled calls."""
        taken: list[_Row] = []
        while self._pending and len(taken) < self._max_rows:
            row = self._pending.popleft()
            if not row.result.done():
                taken.append(row)
        return taken

    async def _complete(self, batch: list[_Row]) -> None:
        try:
            sampled = await self._sample([row.request for row in batch])
        except Exception as error:  # noqa: BLE001 (raised by every call)
            _fail(batch, error)
            return
        except BaseException:  # closed: these rows are no longer pending
            _fail(batch, anyio.ClosedResourceError())
            raise
        self._observe(sampled)
        for row, completion in zip(batch, _completions(sampled), strict=True):
            if not row.result.done():
                row.result.set_result(completion)

    async def _sample(self, requests: list[SamplingRequest]) -> SampledTokens:
        """Sample one batch; wait for the first version of the weights, and during pauses of publisher or engine."""
        if self._weights is not None and self._weights.version == NO_VERSION:
            await self._weights.newer()
        for _ in range(ATTEMPTS):
            with suppress(_WeightsOverwritten):
                return await self._sample_once(requests)
        raise PeerLost(
            f"expected to sample {len(requests)} rows before their weights are overwritten, failed {ATTEMPTS} "
            f"times: raise WeightPublisher's release_timeout_s, lower max_rows, or set weight_updates='in_flight'"
        )

    async def _sample_once(self, requests: list[SamplingRequest]) -> SampledTokens:
        sampled: SampledTokens | None = None
        batch: SamplingBatch | None = None
        while sampled is None:
            async with self._admitted():
                batch = batch or SamplingBatch(
                    self._model, requests, eos_id=self._eos_id, generator=self._generator_of_device()
                )
                sampled = await anyio.to_thread.run_sync(self._advance, batch)
        return sampled

    @asynccontextmanager
    async def _admitted(self) -> AsyncGenerator[None]:
        """Enter the body while neither publisher nor engine pauses; wait for one without delaying the other."""
        while True:
            await self._gate.opened()
            async with nullcontext() if self._weights is None else self._weights.sampling():
                if not self._gate.closed_for:
                    with self._gate.inside():
                        yield
                    return

    def _generator_of_device(self) -> torch.Generator:
        if self._generator is None:
            device = next(self._model.parameters()).device
            if device.type == "meta" and self._weights is not None:
                device = torch.device(self._weights.device)
            self._generator = torch.Generator(device)
        return self._generator

    def _advance(self, batch: SamplingBatch) -> SampledTokens | None:
        """Sample token after token. Return None if a pause waits for the batch, which continues with other weights."""
        self._load_newest()
        while True:
            self._check_open()
            self._reseed()
            sampled = batch.step(self._version)
            if self._weights is not None and not self._weights.intact:
                raise _WeightsOverwritten
            if sampled is not None:
                return sampled
            if self._in_flight:
                if self._gate.closed_for or (self._weights is not None and self._weights.paused):
                    return None
                self._load_newest()

    def _load_newest(self) -> None:
        """Load the newest version into a model that follows its publisher."""
        while self._follows and self._weights is not None:
            self._check_open()
            self._version = self._weights.refresh()
            if self._version != NO_VERSION:
                return

    def _reseed(self) -> None:
        """Seed the generator for the version, so that a resumed run draws the same numbers."""
        if self._seeded_for != self._version:
            self._generator_of_device().manual_seed(as_seed([self._seed, self._version]))
            self._seeded_for = self._version

    def _check_open(self) -> None:
        if self._closed:
            raise anyio.ClosedResourceError

    def _observe(self, sampled: SampledTokens) -> None:
        metrics = current().metrics
        metrics.total("rollout/tokens", int(sampled.lengths.sum()))
        metrics.mean("rollout/rows_per_batch", len(sampled.lengths))

    # -- weights and memory --------------------------------------------------------------------------------------------

    async def follow(self, url: str) -> None:
        """Begin every batch with the newest weights published at `url`; the first batch waits for a version.

        Raises:
            NobodyListens: there is no publisher at `url`.
            WeightsMismatch: its weights do not fit the model.
        """
        self._follows = True
        await self._subscribe(url)

    async def update_weights(self, url: str, version: int) -> None:
        """Use the weights that a publisher publishes at `url`, of `version` or newer; see `Engine`.

        Raises:
            EngineRefused: the engine sleeps, or is subscribed to another publisher.
            NobodyListens: there is no publisher at `url`.
            WeightsMismatch: its weights do not fit the model.
            PeerLost: the publisher died, or closed, before it published `version`.
        """
        async with self._one_at_a_time:
            if "asleep" in self._gate.closed_for:
                raise EngineRefused(f"expected an engine that is awake, got {self!r}: call wake_up first")
            weights = self._weights or await self._subscribe(url)
            if weights.url != url:
                raise EngineRefused(f"expected weights of {weights.url}, which this engine subscribed to, got {url}")
            await weights.newer(than=version - 1)
            await self._gate.close("updating")
            try:
                await self._refresh(weights, least=version)
            finally:
                self._gate.open("updating")

    async def _refresh(self, weights: Subscriber, *, least: int) -> None:
        """Load the newest version, `least` or newer, again if the publisher overwrites it meanwhile."""
        while (version := await anyio.to_thread.run_sync(weights.refresh)) < least:
            pass
        self._version = version

    async def _subscribe(self, url: str) -> Subscriber:
        """Subscribe in a task of its own, so that any task may call this."""
        weights: Subscriber = await self._tasks.start(self._hold, url)
        self._weights = weights
        return weights

    async def _hold(self, url: str, *, task_status: TaskStatus[Subscriber]) -> None:
        async with subscriber(url) as weights:
            await anyio.to_thread.run_sync(self._attach, weights)
            task_status.started(weights)
            await anyio.sleep_forever()

    def _attach(self, weights: Subscriber) -> None:
        """Attach the model: as views if it follows versions that it can map; else as copies, which stay unchanged.

        A model of which only a part is published, such as adapters, has that part copied.
        """
        model = self._model
        devices = {str(parameter.device) for parameter in model.parameters()}
        if not isinstance(model, torch.nn.Module):
            weights.attach(model.state_dict())
        else:
            whole = len(model.state_dict()) >= len(list(model.parameters()))
            weights.attach(model, copied=not (whole and self._follows and devices <= {weights.device, "meta"}))

    async def pause(self) -> None:
        """Stop sampling until `resume`; return when the running batch is done."""
        await self._gate.close("paused")

    async def resume(self) -> None:
        """End the pause."""
        self._gate.open("paused")

    async def sleep(self) -> None:
        """Pause until `wake_up`, and release the memory of weights that can be loaded from the publisher again."""
        async with self._one_at_a_time:
            await self._gate.close("asleep")
            if self._weights is not None:
                self._released = self._released or {storage: storage.nbytes() for storage in _storages(self._model)}
                for storage in self._released:
                    storage.resize_(0)
                if self._released:
                    self._weights.detach()  # `wake_up` attaches again
                torch.cuda.empty_cache()  # for other processes; no effect without a GPU

    async def wake_up(self) -> None:
        """Restore the memory, and fill it with the newest weights.

        Raises:
            PeerLost: the publisher died; the engine still sleeps.
        """
        async with self._one_at_a_time:
            if self._released and self._weights is not None:
                for storage, nbytes in self._released.items():
                    storage.resize_(nbytes)
                self._weights.attach(self._model.state_dict())  # its tensors were compared at the first attach
                await self._weights.newer()
                await self._refresh(self._weights, least=0)
                self._released = {}
            self._gate.open("asleep")

    def close(self) -> None:
        """Stop sampling: a running batch ends with its current token; waiting calls raise ClosedResourceError."""
        self._closed = True
        _fail(self._pending, anyio.ClosedResourceError())
        self._pending.clear()


def _fail(rows: Iterable[_Row], error: Exception) -> None:
    for row in rows:
        if not row.result.done():
            row.result.set_exception(error)


def _storages(model: CausalModel) -> list[torch.UntypedStorage]:
    """Return the storages of the published tensors, tied ones once, without those mapped from a publisher."""
    storages = {storage.data_ptr(): storage for storage in map(Tensor.untyped_storage, model.state_dict().values())}
    return [storage for storage in storages.values() if storage.resizable()]


class _WeightsOverwritten(Exception):
    """The publisher overwrote the weights of a running batch, whose tokens are invalid."""


def _completions(sampled: SampledTokens) -> Iterator[Completion]:
    *rows, versions = sampled
    for tokens, logprobs, length, ended in zip(*rows, strict=True):
        yield Completion(
            tokens=tokens[:length],
            logprobs=logprobs[:length],
            stop_reason=StopReason.STOP if ended else StopReason.LENGTH,
            policy_versions=versions[:length],
        )
