"""Sampling a torch model: many requests as one batch, a cache of keys and values, log-probabilities on the way.

Requests that several rollouts make in the same tick are answered by one batch; those that arrive while it runs make
the next one. A batch runs in a worker thread, with the weights it began with: new ones are taken up between batches,
which is also where a pause begins. Equal prompts, as those of a group, are read once. Knows the model only by
`CausalModel`, and no environment.

Axes: B rows of a batch, b rows still being sampled, P tokens of the longest prompt, M of the largest allowance,
V vocabulary.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import anyio
import anyio.to_thread
import numpy as np
import torch
from anyio.abc import TaskGroup, TaskStatus
from anyio.lowlevel import checkpoint
from numpy.typing import NDArray
from torch import Tensor

from ..pipeline.context import Worker, current
from ..pipeline.errors import EngineRefused
from ..pipeline.weight_subscriber import WeightSubscriber
from ..pipeline.weights import NO_VERSION
from ..schemas import StopReason
from .causal_model import CausalModel, KVCache, causal_attend, positions_of
from .gate import Gate
from .policies import Completion, Engine

__all__ = ["Request", "Sampled", "TorchEngine", "TorchPolicy", "generate"]

FINISHED_SHARE = 0.25
"""Share of finished rows above which a batch drops them: dropping copies the cache, keeping computes for nothing."""


@dataclass(frozen=True, slots=True)
class TorchPolicy:
    """A recipe for sampling a torch model."""

    make_model: Callable[[], CausalModel]
    """Makes the model, in the process that samples; a module-level function, so that the recipe can be pickled."""
    eos_id: int
    """The token that ends a completion."""
    weights: str | None = None
    """URL of the WeightPublisher whose newest version every batch begins with; without one the model stays as it was
    made, version 0, until `update_weights` brings others."""
    seed: int = 0
    """Makes sampling repeatable where the order of requests is; every worker draws a stream of its own."""
    max_rows: int = 256
    """Rows of one batch at most: bounds the memory of the cache."""

    @asynccontextmanager
    async def open(self, worker: Worker) -> AsyncGenerator[Engine]:
        """Make the model and answer requests until the body ends."""
        model = await anyio.to_thread.run_sync(self.make_model)
        model.train(False)
        device = next(model.parameters()).device
        generator = torch.Generator(device).manual_seed(_seed(self.seed, worker))
        stack = AsyncExitStack()
        try:
            tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(tasks.cancel_scope.cancel)
            engine = TorchEngine(model, tasks, self.eos_id, generator, self.max_rows)
            stack.callback(engine.close)
            if self.weights is not None:
                await engine.follow(self.weights)
            tasks.start_soon(engine.serve)
            yield engine
        finally:
            await stack.aclose()  # and no `async with`: the task group would wrap what the body raises


def _seed(seed: int, worker: Worker) -> int:
    """A seed of its own for every worker, also after a restart."""
    state = np.random.SeedSequence([seed, worker.index, worker.incarnation]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


class Request(NamedTuple):
    """One row to sample."""

    prompt: NDArray[np.int32]
    """Token ids, at least one."""
    max_tokens: int
    temperature: float = 1.0
    greedy: bool = False


class Sampled(NamedTuple):
    """What was sampled for a batch of requests; B rows, M the largest allowance."""

    tokens: NDArray[np.int32]
    """[B, M]; row b counts up to lengths[b]."""
    logprobs: NDArray[np.float32]
    """[B, M] under the tempered distribution, or the model's own where greedy."""
    lengths: NDArray[np.int64]
    """[B] tokens of each completion, its end-of-sequence token included."""
    ended: NDArray[np.bool_]
    """[B] whether the last token is the end-of-sequence token."""


@torch.inference_mode()
def generate(
    model: CausalModel,
    requests: Sequence[Request],
    *,
    eos_id: int,
    generator: torch.Generator,
    before_token: Callable[[], None] = lambda: None,
) -> Sampled:
    """Sample one completion a request, all of them together.

    Args:
        model: on any device, in evaluation mode.
        requests: at least one.
        eos_id: the token that ends a completion.
        generator: on the model's device.
        before_token: called before each token; what it raises ends the batch.
    """
    rows = _Rows.of(requests, generator.device)
    logits = rows.read_prompts(model, [request.prompt for request in requests])
    tokens = torch.full((len(requests), rows.allowance), eos_id, device=generator.device)
    logprobs = torch.zeros(tokens.shape, device=generator.device)
    for t in range(rows.allowance):
        before_token()
        chosen, logprob = rows.draw(logits, generator)
        tokens[rows.live, t] = chosen
        logprobs[rows.live, t] = logprob
        chosen = rows.drop_finished(chosen, (chosen == eos_id) | (rows.limits == t + 1))
        if not len(chosen):
            break
        logits = rows.step(model, chosen)
    limits = np.array([request.max_tokens for request in requests])
    return _cut(tokens.to(torch.int32).cpu().numpy(), logprobs.cpu().numpy(), limits, eos_id)


def _cut(tokens: NDArray[np.int32], logprobs: NDArray[np.float32], limits: NDArray[np.int64], eos_id: int) -> Sampled:
    """Each row ends with its first end-of-sequence token, or at its limit."""
    ends = tokens == eos_id
    first = np.where(ends.any(axis=1), ends.argmax(axis=1), tokens.shape[1])
    return Sampled(tokens, logprobs, np.minimum(first + 1, limits), first < limits)


@dataclass(slots=True)
class _Rows:
    """The rows still being sampled, and those that finished and were not dropped yet."""

    allowance: int
    """M: tokens that any row may get at most."""
    live: Tensor
    """[b] int64, which request each row answers."""
    limits: Tensor
    """[b] int64 tokens that each row may get."""
    inverse_temperature: Tensor
    """[b, 1]."""
    noise: Tensor
    """[b, 1] 1 where a row is drawn, 0 where it is greedy."""
    finished: Tensor
    """[b] bool."""
    visible: Tensor = field(init=False)
    """[b, P + M] bool: keys a row may see, its padding on the left left out."""
    position: Tensor = field(init=False)
    """[b, 1] int64 position of the next token."""
    cache: KVCache = field(init=False)

    @classmethod
    def of(cls, requests: Sequence[Request], device: torch.device) -> _Rows:
        greedy = torch.tensor([request.greedy for request in requests], device=device)[:, None]
        temperature = torch.tensor([request.temperature for request in requests], device=device)[:, None]
        return cls(
            allowance=max(request.max_tokens for request in requests),
            live=torch.arange(len(requests), device=device),
            limits=torch.tensor([request.max_tokens for request in requests], device=device),
            inverse_temperature=torch.where(greedy, 1.0, 1.0 / temperature),
            noise=(~greedy).float(),
            finished=torch.zeros(len(requests), dtype=torch.bool, device=device),
        )

    def read_prompts(self, model: CausalModel, prompts: Sequence[NDArray[np.int32]]) -> Tensor:
        """Read each different prompt once, then give every row its copy. Returns logits [b, V]."""
        tokens, mask, owner = (torch.from_numpy(array).to(self.live.device) for array in _left_padded(prompts))
        self.cache = model.new_cache(len(tokens), mask.shape[1] + self.allowance)
        logits = model(tokens, positions=positions_of(mask), attend=causal_attend(mask), cache=self.cache)[:, -1]
        self.cache.keep(owner)
        self.position = mask.sum(dim=1, keepdim=True)[owner]
        self.visible = torch.nn.functional.pad(mask[owner], (0, self.allowance), value=True)
        return logits[owner]

    def draw(self, logits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """One token a row and its log-probability, [b] each, by the Gumbel trick."""
        logprobs = torch.log_softmax(logits.float() * self.inverse_temperature, dim=-1)
        gumbel = -torch.empty_like(logprobs).exponential_(generator=generator).log_()
        chosen = (logprobs + gumbel * self.noise).argmax(dim=-1, keepdim=True)
        return chosen[:, 0], logprobs.gather(1, chosen)[:, 0]

    def drop_finished(self, chosen: Tensor, ended: Tensor) -> Tensor:
        """Note which rows `ended` [b]; once enough have, go on without them. Returns `chosen` of the rows that stay."""
        self.finished |= ended
        count = int(self.finished.sum())
        if count == len(self.finished):
            return chosen[:0]
        if count <= FINISHED_SHARE * len(self.finished):
            return chosen
        stay = (~self.finished).nonzero()[:, 0]
        self.cache.keep(stay)
        for name in ("live", "limits", "inverse_temperature", "noise", "finished", "visible", "position"):
            setattr(self, name, getattr(self, name)[stay])
        return chosen[stay]

    def step(self, model: CausalModel, chosen: Tensor) -> Tensor:
        """Feed one token a row. Returns logits [b, V]."""
        attend = self.visible[:, None, : self.cache.length + 1]
        logits = model(chosen[:, None], positions=self.position, attend=attend, cache=self.cache)[:, 0]
        self.position = self.position + 1
        return logits


def _left_padded(
    prompts: Sequence[NDArray[np.int32]],
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]:
    """The different prompts as tokens and mask [U, P], padded on the left, and which of them each prompt is [B]."""
    first: dict[bytes, int] = {}
    owner = [first.setdefault(prompt.tobytes(), len(first)) for prompt in prompts]
    unique = [np.frombuffer(key, np.int32) for key in first]
    lengths = np.array([len(prompt) for prompt in unique])
    mask = np.arange(lengths.max()) >= (lengths.max() - lengths)[:, None]
    tokens = np.zeros(mask.shape, np.int64)
    tokens[mask] = np.concatenate(unique)
    return tokens, mask, np.array(owner)


@dataclass(slots=True)
class _Call:
    """One call of `sample`: answered when all its rows are."""

    requests: list[Request]
    answered: asyncio.Future[list[Completion]]
    completions: dict[int, Completion] = field(default_factory=dict)

    def answer(self, row: int, completion: Completion) -> None:
        self.completions[row] = completion
        if len(self.completions) == len(self.requests) and not self.answered.done():
            self.answered.set_result([self.completions[index] for index in range(len(self.requests))])

    def fail(self, error: Exception) -> None:
        if not self.answered.done():
            self.answered.set_exception(error)


class TorchEngine:
    """Answers requests in batches; see `Engine`. One event loop uses it."""

    def __init__(
        self,
        model: CausalModel,
        tasks: TaskGroup,
        eos_id: int,
        generator: torch.Generator,
        max_rows: int,
    ) -> None:
        self._model = model
        self._tasks = tasks
        """Holds the subscription."""
        self._weights: WeightSubscriber | None = None
        self._follows = False
        """Whether every batch takes up newer weights by itself; else `update_weights` does."""
        self._eos_id = eos_id
        self._generator = generator
        self._max_rows = max_rows
        self._pending: deque[tuple[_Call, int]] = deque()
        """Rows nobody samples yet, in the order they were asked for."""
        self._asked = anyio.Event()
        """Set while rows may be pending."""
        self._closed = False
        """Read by the worker thread before each token."""
        self._gate = Gate()
        """Every batch passes it."""
        self._one_at_a_time = anyio.Lock()
        """Held by whoever changes the weights or their memory."""
        self._let_go: dict[torch.UntypedStorage, int] = {}
        """Memory of the model that `sleep` gave back, and the bytes it had."""
        self._version = 0

    def __repr__(self) -> str:
        state = " and ".join(sorted(self._gate.shut_for)) or "awake"
        return f"<TorchEngine {state}, version {self._version}: {len(self._pending)} rows waiting>"

    async def generate(
        self,
        prompts: Sequence[NDArray[np.int32]],
        *,
        max_tokens: int,
        temperature: float = 1.0,
        greedy: bool = False,
    ) -> list[Completion]:
        """One completion a prompt, in order; see `Engine.generate`.

        Raises:
            ValueError: a prompt is empty, or `max_tokens` or `temperature` is not above 0.
            anyio.ClosedResourceError: the policy was closed meanwhile.
        """
        if max_tokens < 1 or temperature <= 0 or not all(len(prompt) for prompt in prompts):
            lengths = [len(prompt) for prompt in prompts]
            raise ValueError(
                f"expected prompts of at least one token, max_tokens >= 1 and temperature > 0, "
                f"got lengths {lengths}, max_tokens={max_tokens}, temperature={temperature}"
            )
        self._check_open()
        if not prompts:
            return []
        requests = [Request(np.asarray(prompt, np.int32), max_tokens, temperature, greedy) for prompt in prompts]
        call = _Call(requests, asyncio.get_running_loop().create_future())
        self._pending.extend((call, row) for row in range(len(requests)))
        self._asked.set()
        return await call.answered

    async def serve(self) -> None:
        """Sample what is asked for, batch after batch, until cancelled."""
        while True:
            await self._asked.wait()
            await self._tick()
            batch = self._take()
            if not self._pending:
                self._asked = anyio.Event()
            if batch:
                await self._answer(batch)

    async def _tick(self) -> None:
        """Let every task that is about to ask do so."""
        known = -1
        while len(self._pending) != known:
            known = len(self._pending)
            await checkpoint()

    def _take(self) -> list[tuple[_Call, int]]:
        """The next rows, those left out whose caller has gone."""
        taken: list[tuple[_Call, int]] = []
        while self._pending and len(taken) < self._max_rows:
            call, row = self._pending.popleft()
            if not call.answered.done():
                taken.append((call, row))
        return taken

    async def _answer(self, batch: list[tuple[_Call, int]]) -> None:
        try:
            sampled = await self._sampled([call.requests[row] for call, row in batch])
        except Exception as error:  # noqa: BLE001 (handed to everyone who asked)
            for call, _ in batch:
                call.fail(error)
            return
        self._observe(sampled)
        for (call, row), completion in zip(batch, _completions(sampled, self._version), strict=True):
            call.answer(row, completion)

    async def _sampled(self, requests: list[Request]) -> Sampled:
        """One batch: waits for the first version of the weights, and while the publisher or the engine pauses."""
        if self._weights is not None and self._weights.version == NO_VERSION:
            await self._weights.newer()
        async with self._allowed():
            if self._weights is not None and self._follows:
                await self._refresh(self._weights, least=0)
            return await anyio.to_thread.run_sync(self._generate, requests)

    @asynccontextmanager
    async def _allowed(self) -> AsyncGenerator[None]:
        """Neither the publisher nor the engine pauses; neither is kept waiting while the other does."""
        while True:
            await self._gate.opened()
            async with nullcontext() if self._weights is None else self._weights.sampling():
                if not self._gate.shut_for:
                    with self._gate.inside():
                        yield
                    return

    def _generate(self, requests: list[Request]) -> Sampled:
        return generate(
            self._model,
            requests,
            eos_id=self._eos_id,
            generator=self._generator,
            before_token=self._check_open,
        )

    def _check_open(self) -> None:
        if self._closed:
            raise anyio.ClosedResourceError

    def _observe(self, sampled: Sampled) -> None:
        metrics = current().metrics
        metrics.total("rollout/tokens", int(sampled.lengths.sum()))
        metrics.mean("rollout/rows_per_batch", len(sampled.lengths))

    # -- weights and memory --------------------------------------------------------------------------------------------

    async def follow(self, url: str) -> None:
        """Begin every batch with the newest weights published at `url`; the first waits for the first version.

        Raises:
            NobodyListens: there is no publisher at `url`.
            WeightsMismatch: its weights do not fit the model.
        """
        await self._subscribe(url)
        self._follows = True

    async def update_weights(self, url: str, version: int) -> None:
        """Sample from now on with the weights at `url`, a WeightPublisher's, of `version` or newer; see `Engine`.

        Raises:
            EngineRefused: the engine sleeps, or has its weights from another publisher.
            NobodyListens: there is no publisher at `url`.
            WeightsMismatch: its weights do not fit the model.
            PeerLost: the publisher died, or closed, before it published `version`.
        """
        async with self._one_at_a_time:
            if "asleep" in self._gate.shut_for:
                raise EngineRefused(f"expected an engine that is awake, got {self!r}: call wake_up first")
            weights = self._weights or await self._subscribe(url)
            if weights.url != url:
                raise EngineRefused(f"expected weights of {weights.url}, which this engine samples with, got {url}")
            await weights.newer(than=version - 1)
            await self._gate.shut("updating")
            try:
                await self._refresh(weights, least=version)
            finally:
                self._gate.open("updating")

    async def _refresh(self, weights: WeightSubscriber, *, least: int) -> None:
        """Bring the model to the newest version, which is `least` or newer, however often the publisher overtakes."""
        while (version := await anyio.to_thread.run_sync(weights.refresh)) < least:
            pass
        self._version = version

    async def _subscribe(self, url: str) -> WeightSubscriber:
        """The subscription is held by a task of its own, so that any task may ask for it."""
        self._weights = await self._tasks.start(self._hold, url)
        return self._weights

    async def _hold(self, url: str, *, task_status: TaskStatus[WeightSubscriber]) -> None:
        async with WeightSubscriber(url) as subscriber:
            subscriber.attach(self._model.state_dict())
            task_status.started(subscriber)
            await anyio.sleep_forever()

    async def pause(self) -> None:
        """Sample nothing more until `resume`; returns when the batch that runs is done."""
        await self._gate.shut("paused")

    async def resume(self) -> None:
        """End the pause."""
        self._gate.open("paused")

    async def sleep(self) -> None:
        """As `pause`, until `wake_up`, and let go of the memory of weights that are published and can be read again."""
        async with self._one_at_a_time:
            await self._gate.shut("asleep")
            if self._weights is not None:
                self._let_go = self._let_go or {storage: storage.nbytes() for storage in _storages(self._model)}
                for storage in self._let_go:
                    storage.resize_(0)
                torch.cuda.empty_cache()  # to other processes; without a GPU it does nothing

    async def wake_up(self) -> None:
        """Take the memory back, and fill it with the newest weights.

        Raises:
            PeerLost: the publisher died; the engine sleeps on.
        """
        async with self._one_at_a_time:
            if self._let_go and self._weights is not None:
                for storage, nbytes in self._let_go.items():
                    storage.resize_(nbytes)
                self._weights.attach(self._model.state_dict())
                await self._weights.newer()
                await self._refresh(self._weights, least=0)
                self._let_go = {}
            self._gate.open("asleep")

    def close(self) -> None:
        """Stop sampling: a batch that runs ends with the token it is at; whoever waits gets ClosedResourceError."""
        self._closed = True
        for call, _ in self._pending:
            call.fail(anyio.ClosedResourceError())
        self._pending.clear()


def _storages(model: CausalModel) -> list[torch.UntypedStorage]:
    """The memory of what is published, that of tied tensors once; what is not the model's own is left out."""
    storages = {storage.data_ptr(): storage for storage in map(Tensor.untyped_storage, model.state_dict().values())}
    return [storage for storage in storages.values() if storage.resizable()]


def _completions(sampled: Sampled, version: int) -> Iterator[Completion]:
    for tokens, logprobs, length, ended in zip(*sampled, strict=True):
        yield Completion(
            tokens=tokens[:length],
            logprobs=logprobs[:length],
            stop_reason=StopReason.STOP if ended else StopReason.LENGTH,
            policy_versions=np.full(length, version, np.int64),
        )
