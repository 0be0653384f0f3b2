"""`TorchEngine`: samples a torch model in this process.

Requests are admitted and returned continuously: a row that is done is returned at once, and rows that wait join those
that are being sampled, while neither newer weights nor a pause wait for these to end. Requests decide which rows are
sampled together, not a clock, as far as tasks request by themselves: rows are admitted when every task that a result
woke waits again. Sampling runs in a worker thread, each row with the weights that it began with; or, with updates in
flight, every token with the newest. If the model can map the publisher's memory, its tensors are views of
it: there is no second copy. Knows the model only by `CausalModel`, and no environment.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import anyio
import anyio.to_thread
import numpy as np
import torch
from anyio.abc import TaskGroup, TaskStatus
from numpy.typing import NDArray
from torch import Tensor

from ..._pipeline.errors import EngineRefused, InvalidConfig, PeerLost
from ..._pipeline.graph.context import current
from ..._pipeline.util.quiescence import others_blocked
from ..._pipeline.weights.weight_address import WeightAddress
from ..._pipeline.weights.weight_subscriber import WeightSubscriber
from ..._pipeline.weights.weights import NO_VERSION
from ..._schemas import StopReason
from ..contracts.causal_model import CausalModel, HasVocabulary, positions_in
from ..contracts.policies import Completion, Tokenizer, check_positions, check_prompts
from ..contracts.sampling_params import SamplingParams, as_seed
from ..http.gate import GenerationGate
from ..tokenizers.stop_strings import StopStrings
from .torch_routes import RouteRecorder, routes_of
from .torch_rows import SampledRow, SamplingRequest
from .torch_sampling import SamplingBatch

ATTEMPTS = 3
"""Attempts for a row; more than one only if the publisher overwrites its weights after a timeout."""

ADMITTED_PARTS = 8
"""Number of parts of the rows. If more rows wait than fit, they are admitted when one part is free: those of a group
together, so that their prompt is read once."""


@dataclass(slots=True)
class _Row:
    """One prompt of a call of `generate`."""

    request: SamplingRequest
    result: asyncio.Future[Completion]
    """Cancelled with the call."""
    attempts: int = 0
    """Times that its weights were overwritten."""


class TorchEngine:
    """Samples requests in batches; see `Engine`. One event loop uses it."""

    def __init__(
        self,
        model: CausalModel,
        tasks: TaskGroup,
        end_ids: frozenset[int],
        seed: int,
        max_rows: int,
        *,
        in_flight: bool = False,
        tokenizer: Tokenizer | None = None,
        autocast: torch.dtype | None = None,
        routed_experts: bool = False,
    ) -> None:
        self._model = model
        self._vocabulary = model.vocabulary if isinstance(model, HasVocabulary) else None
        """Number of the model's tokens, where it is known."""
        self._positions = positions_in(model)
        """Number of the model's positions, where it has a table of them."""
        self._tasks = tasks
        """Runs the task that holds the subscription."""
        self._weights: WeightSubscriber | None = None
        self._follows = False
        """True if every batch loads newer weights by itself; else `update_weights` does."""
        self._end_ids = end_ids
        self._seed = seed
        self._drawn = (NO_VERSION, 0)
        """A version, and the number of rows without a seed that were admitted with it: such a row draws by both."""
        self._max_rows = max_rows
        self._in_flight = in_flight
        self._tokenizer = tokenizer
        """Finds stop strings."""
        self._autocast = autocast
        """The dtype of the model's computations; None for that of its parameters."""
        self._recorder = RouteRecorder(model) if routed_experts else None
        """Records the experts of each token, if they are wanted."""
        self._pending: deque[_Row] = deque()
        """Rows that are not being sampled yet, in the order of the requests."""
        self._batch: SamplingBatch | None = None
        """None before the first rows, and after an error."""
        self._running: dict[SampledRow, _Row] = {}
        """The rows of the batch that were not returned."""
        self._joining: list[_Row] = []
        """Rows that the worker thread adds to the batch next."""
        self._requested = anyio.Event()
        """Set while rows may be pending."""
        self._closed = False
        """Read by the worker thread before each token."""
        self._gate = GenerationGate()
        """Sampling passes through it."""
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
            InvalidConfig: a prompt is empty, there are stop strings and no tokenizer, or a token that the model lacks,
                or more of them than the model has positions.
            LogitsNotFinite: the model computed logits that are not finite.
            anyio.ClosedResourceError: the policy was closed before the end.
        """
        check_prompts(prompts, self._vocabulary)
        check_positions(prompts, sampling.max_completion_tokens, self._positions)
        self._check_open()
        if not prompts:
            return []
        loop = asyncio.get_running_loop()
        rows = [
            _Row(self._request(prompt, sampling.seeded_for(index), result), result)
            for index, prompt in enumerate(prompts)
            for result in [loop.create_future()]
        ]
        self._pending.extend(rows)
        self._requested.set()
        try:
            return await asyncio.gather(*[row.result for row in rows])
        except asyncio.CancelledError:
            # Rows that were returned, and never received; `_return_done` counts the others.
            _count_cancelled(sum(len(row.result.result().tokens) for row in rows if _succeeded(row.result)))
            raise

    def _request(
        self, prompt: NDArray[np.int32], sampling: SamplingParams, result: asyncio.Future[Completion]
    ) -> SamplingRequest:
        stop = partial(StopStrings, self._text_of(sampling), sampling.stop) if sampling.stop else None
        return SamplingRequest(np.asarray(prompt, np.int32), sampling, stop, result.cancelled)

    def _text_of(self, sampling: SamplingParams) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidConfig(
                f"SamplingParams.stop: expected a source with a tokenizer, which makes text of tokens, got none for "
                f"{list(sampling.stop)}: use SourceEnv(…, tokenizer)"
            )
        return self._tokenizer

    async def serve(self) -> None:
        """Sample the requests until cancelled."""
        while True:
            if not self._running:
                await self._requested.wait()
            await others_blocked()
            try:
                await self._sample()
            except Exception as error:  # noqa: BLE001 (raised by every call)
                self._fail_all(error)
            except BaseException:  # closed
                self._fail_all(anyio.ClosedResourceError())
                raise

    async def _sample(self) -> None:
        """Sample until no row is left, or, with updates in flight, until a pause waits.

        Waits for the first version of the weights, and during pauses of publisher or engine.
        """
        if self._weights is not None and self._weights.version == NO_VERSION:
            await self._weights.newer()
        async with self._admitted():
            self._joining = self._take() if self._admits else []
            while self._joining or self._running:
                admits = await self._advanced()
                if not self._running or (self._in_flight and self._pause_waits):
                    return
                await others_blocked()
                self._joining = self._take() if admits and not self._pause_waits else []

    async def _advanced(self) -> bool:
        """Sample in a thread until rows are done, and return them; see `_advance`."""
        try:
            admits = await anyio.to_thread.run_sync(self._advance)
        except _PromptsFailed as failed:
            _fail(self._joining, failed.error)
            return False
        except _WeightsOverwritten:
            self._sample_again()
            return False
        except Exception as error:  # noqa: BLE001 (raised by every call with rows that were sampled)
            self._fail_running(error)
            return False
        self._return_done()
        return admits

    def _take(self) -> list[_Row]:
        """Return the next rows that fit, without those of cancelled calls."""
        taken: list[_Row] = []
        while self._pending and (taken or self._fits) and len(self._running) + len(taken) < self._max_rows:
            row = self._pending.popleft()
            if not row.result.done():
                taken.append(row)
        if not self._pending:
            self._requested = anyio.Event()
        if taken:
            current().metrics.mean("rollout/rows_per_batch", len(self._running) + len(taken))
        return taken

    @property
    def _fits(self) -> bool:
        """Return whether enough rows are free for those that wait."""
        free = self._max_rows - len(self._running)
        return free >= min(len(self._pending), max(1, self._max_rows // ADMITTED_PARTS))

    @property
    def _pause_waits(self) -> bool:
        """Return whether a pause of publisher or engine, or an update, waits for the end of sampling."""
        return bool(self._gate.closed_for) or (self._weights is not None and self._weights.paused)

    def _return_done(self) -> None:
        """Return the completions of the rows that are done."""
        for sampled in self._batch.take_done() if self._batch is not None else []:
            row = self._running.pop(sampled)
            current().metrics.total("rollout/tokens", len(sampled.tokens))
            if row.result.done():
                _count_cancelled(len(sampled.tokens))
            else:
                row.result.set_result(_completion(sampled))

    def _fail_all(self, error: Exception) -> None:
        """Fail the rows that are being sampled, and those that wait."""
        self._fail_running(error)
        _fail(self._pending, error)
        self._pending.clear()
        self._requested = anyio.Event()

    def _fail_running(self, error: Exception) -> None:
        _fail([*self._running.values(), *self._joining], error)
        self._running, self._joining, self._batch = {}, [], None

    def _sample_again(self) -> None:
        """Let rows with overwritten weights wait again, before the others; fail them after `ATTEMPTS`."""
        rows = list(self._running.values())
        self._running, self._batch = {}, None
        for row in rows:
            row.attempts += 1
        failed = [row for row in rows if row.attempts >= ATTEMPTS]
        error = PeerLost(
            f"expected to sample {len(rows)} rows before their weights are overwritten, failed {ATTEMPTS} times: raise "
            f"WeightPublisher's release_timeout_s, lower max_rows, or set weight_updates='in_flight'"
        )
        _fail(failed, error)
        self._pending.extendleft(reversed([row for row in rows if row.attempts < ATTEMPTS]))
        self._requested.set()

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

    @property
    def _device(self) -> torch.device:
        """Return the device of the model, known since its weights were loaded."""
        device = next(self._model.parameters()).device
        if device.type == "meta" and self._weights is not None:
            return torch.device(self._weights.device)
        return device

    def _advance(self) -> bool:
        """Sample until a row is done, others can join, or, with updates in flight, a pause waits.

        Return whether others can join.
        """
        if not self._running or self._in_flight:
            self._load_newest()
        batch = self._batch = self._batch or self._new_batch()
        if self._joining:
            self._join(batch)
        while not (batch.has_done or (self._pending and self._fits and self._admits)):
            self._check_open()
            if self._in_flight:
                if self._pause_waits:
                    return False
                self._load_newest()
            batch.step(self._version)
            self._check_intact()
        return self._admits

    def _join(self, batch: SamplingBatch) -> None:
        """Read the prompts of the rows that join, and draw their first tokens."""
        self._check_open()
        rows = {SampledRow(row.request, self._seed_of(row.request.sampling)): row for row in self._joining}
        try:
            read = batch.read(list(rows), self._version)
        except Exception as error:
            if self._running:
                raise _PromptsFailed(error) from None
            raise
        self._running |= rows
        self._joining = []
        batch.join(read)
        self._check_intact()

    def _seed_of(self, sampling: SamplingParams) -> int:
        """Return the seed of a row's random numbers: of its request, or of its place among those of this version."""
        if sampling.seed is not None or sampling.greedy:
            return sampling.seed or 0
        version, drawn = self._drawn
        self._drawn = self._version, drawn + 1 if version == self._version else 1
        return as_seed([self._seed, *self._drawn])

    @property
    def _admits(self) -> bool:
        """Return whether rows may join those that are being sampled: neither weights nor a pause wait for their end."""
        if not self._running:
            return True
        if self._batch is None or not self._batch.joinable or self._pause_waits:
            return False
        return self._in_flight or not self._follows or self._weights is None or not self._weights.stale

    def _new_batch(self) -> SamplingBatch:
        return SamplingBatch(
            self._model,
            end_ids=self._end_ids,
            device=self._device,
            autocast=self._autocast,
            recorder=self._recorder,
        )

    def _load_newest(self) -> None:
        """Load the newest version into a model that follows its publisher."""
        while self._follows and self._weights is not None:
            self._check_open()
            self._version = self._weights.refresh()
            if self._version != NO_VERSION:
                return

    def _check_intact(self) -> None:
        if self._weights is not None and not self._weights.intact:
            raise _WeightsOverwritten

    def _check_open(self) -> None:
        if self._closed:
            raise anyio.ClosedResourceError

    # -- weights and memory --------------------------------------------------------------------------------------------

    async def follow(self, url: str | WeightAddress) -> None:
        """Begin every batch with the newest weights published at `url`; the first batch waits for a version.

        Raises:
            NobodyListens: there is no publisher at `url`.
            WeightsMismatch: its weights do not fit the model.
        """
        self._follows = True
        await self._subscribe(url)

    async def arrived(self, version: int) -> None:
        """Wait until published weights of `version` or newer are on this host; see `FollowsWeights`.

        Raises:
            PeerLost, PeerClosed: the publisher died, or closed, before they were.
        """
        if self._follows and self._weights is not None:
            await self._weights.newer(than=version - 1)

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

    async def _refresh(self, weights: WeightSubscriber, *, least: int) -> None:
        """Load the newest version, `least` or newer, again if the publisher overwrites it meanwhile."""
        while (version := await anyio.to_thread.run_sync(weights.refresh)) < least:
            pass
        self._version = version

    async def _subscribe(self, url: str | WeightAddress) -> WeightSubscriber:
        """Subscribe in a task of its own, so that any task may call this."""
        weights: WeightSubscriber = await self._tasks.start(self._hold, url)
        self._weights = weights
        return weights

    async def _hold(self, url: str | WeightAddress, *, task_status: TaskStatus[WeightSubscriber]) -> None:
        async with WeightSubscriber(url) as weights:
            await anyio.to_thread.run_sync(self._attach, weights)
            task_status.started(weights)
            await anyio.sleep_forever()

    def _attach(self, weights: WeightSubscriber) -> None:
        """Attach the model: as views if it follows versions that it can map; else as copies: they stay unchanged.

        If only a part of the model is published, such as adapters, that part is copied.
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


def _count_cancelled(tokens: int) -> None:
    """Count tokens that were sampled for calls that were cancelled."""
    if tokens:
        current().metrics.total("rollout/dropped_tokens/cancelled", tokens)


def _succeeded(result: asyncio.Future[Completion]) -> bool:
    return result.done() and not result.cancelled() and result.exception() is None


def _fail(rows: Iterable[_Row], error: Exception) -> None:
    for row in rows:
        if not row.result.done():
            row.result.set_exception(error)


def _storages(model: CausalModel) -> list[torch.UntypedStorage]:
    """Return the storages of the published tensors, tied ones once, without those mapped from a publisher."""
    storages = {storage.data_ptr(): storage for storage in map(Tensor.untyped_storage, model.state_dict().values())}
    return [storage for storage in storages.values() if storage.resizable()]


class _WeightsOverwritten(Exception):
    """The publisher overwrote the weights of rows that were being sampled: their tokens are invalid."""


class _PromptsFailed(Exception):
    """The prompts of rows that should join could not be read; those that are being sampled go on."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


def _completion(row: SampledRow) -> Completion:
    return Completion(
        tokens=np.array(row.tokens, np.int32),
        logprobs=np.array(row.logprobs, np.float32),
        stop_reason=StopReason.STOP if row.ended else StopReason.LENGTH,
        policy_versions=np.array(row.versions, np.int64),
        routed_experts=routes_of(row),
        support_ids=np.array(row.supports, np.int32) if row.request.sampling.support else None,
    )
