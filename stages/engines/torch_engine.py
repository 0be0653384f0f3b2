"""`TorchEngine`: samples a torch model in this process.

Requests that several rollouts make in the same tick are answered by one batch; those that arrive while it runs make
the next one. A batch runs in a worker thread, with the weights it began with; or, with updates in flight, every token
with the newest there are. Where the model can see the publisher's memory, its tensors are views of it: there is no
second copy. Knows the model only by `CausalModel`, and no environment.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field

import anyio
import anyio.to_thread
import numpy as np
import torch
from anyio.abc import TaskGroup, TaskStatus
from anyio.lowlevel import checkpoint
from numpy.typing import NDArray
from torch import Tensor

from ..._pipeline.context import current
from ..._pipeline.errors import EngineRefused, PeerLost
from ..._pipeline.policy.weights import NO_VERSION
from ..._schemas import StopReason
from ..training.causal_model import CausalModel
from .gate import GenerationGate
from .policies import Completion, check_request
from .torch_folder_subscriber import Subscriber, subscriber
from .torch_sampling import Batch, Request, Sampled

__all__ = ["TorchEngine", "as_seed"]

ATTEMPTS = 3
"""How often a batch is begun: more than once only where the publisher lost patience with it."""


def as_seed(numbers: Sequence[int]) -> int:
    """A seed for what all of `numbers` name."""
    (state,) = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return int(state >> np.uint64(1))


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
        seed: int,
        max_rows: int,
        *,
        in_flight: bool = False,
    ) -> None:
        self._model = model
        self._tasks = tasks
        """Holds the subscription."""
        self._weights: Subscriber | None = None
        self._follows = False
        """Whether every batch takes up newer weights by itself; else `update_weights` does."""
        self._eos_id = eos_id
        self._seed = seed
        self._seeded_for: int | None = None
        """The version for which the numbers were drawn last."""
        self._generator: torch.Generator | None = None
        """Made with the first batch, on the model's device: one that was built on the meta device has none before."""
        self._max_rows = max_rows
        self._in_flight = in_flight
        self._pending: deque[tuple[_Call, int]] = deque()
        """Rows nobody samples yet, in the order they were asked for."""
        self._asked = anyio.Event()
        """Set while rows may be pending."""
        self._closed = False
        """Read by the worker thread before each token."""
        self._gate = GenerationGate()
        """Every batch passes it."""
        self._one_at_a_time = anyio.Lock()
        """Held by whoever changes the weights or their memory."""
        self._let_go: dict[torch.UntypedStorage, int] = {}
        """Memory of the model that `sleep` gave back, and the bytes it had."""
        self._version = 0

    def __repr__(self) -> str:
        state = " and ".join(sorted(self._gate.closed_for)) or "awake"
        return f"<TorchEngine {state}, version {self._version}: {len(self._pending)} rows waiting>"

    async def generate(
        self,
        prompts: Sequence[NDArray[np.int32]],
        *,
        max_completion_tokens: int,
        temperature: float = 1.0,
        greedy: bool = False,
    ) -> list[Completion]:
        """One completion a prompt, in order; see `Engine.generate`.

        Raises:
            ValueError: a prompt is empty, or `max_completion_tokens` or `temperature` is not above 0.
            anyio.ClosedResourceError: the policy was closed meanwhile.
        """
        check_request(prompts, max_completion_tokens, temperature)
        self._check_open()
        if not prompts:
            return []
        requests = [
            Request(np.asarray(prompt, np.int32), max_completion_tokens, temperature, greedy) for prompt in prompts
        ]
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
        except BaseException:  # closed, while these rows are in nobody's line any more
            for call, _ in batch:
                call.fail(anyio.ClosedResourceError())
            raise
        self._observe(sampled)
        for (call, row), completion in zip(batch, _completions(sampled), strict=True):
            call.answer(row, completion)

    async def _sampled(self, requests: list[Request]) -> Sampled:
        """One batch: waits for the first version of the weights, and while the publisher or the engine pauses."""
        if self._weights is not None and self._weights.version == NO_VERSION:
            await self._weights.newer()
        for _ in range(ATTEMPTS):
            with suppress(_Overtaken):
                return await self._sampled_once(requests)
        raise PeerLost(
            f"expected to sample {len(requests)} rows before their weights are written over, began {ATTEMPTS} times in "
            f"vain: raise WeightPublisher's release_timeout_s, lower max_rows, or set weight_updates='in_flight'"
        )

    async def _sampled_once(self, requests: list[Request]) -> Sampled:
        sampled: Sampled | None = None
        batch: Batch | None = None
        while sampled is None:
            async with self._allowed():
                batch = batch or Batch(self._model, requests, eos_id=self._eos_id, generator=self._numbers())
                sampled = await anyio.to_thread.run_sync(self._advance, batch)
        return sampled

    @asynccontextmanager
    async def _allowed(self) -> AsyncGenerator[None]:
        """Neither the publisher nor the engine pauses; neither is kept waiting while the other does."""
        while True:
            await self._gate.opened()
            async with nullcontext() if self._weights is None else self._weights.sampling():
                if not self._gate.closed_for:
                    with self._gate.inside():
                        yield
                    return

    def _numbers(self) -> torch.Generator:
        if self._generator is None:
            device = next(self._model.parameters()).device
            if device.type == "meta" and self._weights is not None:
                device = torch.device(self._weights.device)
            self._generator = torch.Generator(device)
        return self._generator

    def _advance(self, batch: Batch) -> Sampled | None:
        """Sample token after token. None where somebody waits for the batch, and it can go on with other weights."""
        self._take_up()
        while True:
            self._check_open()
            self._seed_anew()
            sampled = batch.step(self._version)
            if self._weights is not None and not self._weights.intact:
                raise _Overtaken
            if sampled is not None:
                return sampled
            if self._in_flight:
                if self._gate.closed_for or (self._weights is not None and self._weights.paused):
                    return None
                self._take_up()

    def _take_up(self) -> None:
        """Bring a model that follows its publisher to the newest version; there is one."""
        while self._follows and self._weights is not None:
            self._check_open()
            self._version = self._weights.refresh()
            if self._version != NO_VERSION:
                return

    def _seed_anew(self) -> None:
        """Every version has numbers of its own: a run that goes on with it draws what one draws that never stopped."""
        if self._seeded_for != self._version:
            self._numbers().manual_seed(as_seed([self._seed, self._version]))
            self._seeded_for = self._version

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
        self._follows = True
        await self._subscribe(url)

    async def update_weights(self, url: str, version: int) -> None:
        """Sample from now on with the weights at `url`, a WeightPublisher's, of `version` or newer; see `Engine`.

        Raises:
            EngineRefused: the engine sleeps, or has its weights from another publisher.
            NobodyListens: there is no publisher at `url`.
            WeightsMismatch: its weights do not fit the model.
            PeerLost: the publisher died, or closed, before it published `version`.
        """
        async with self._one_at_a_time:
            if "asleep" in self._gate.closed_for:
                raise EngineRefused(f"expected an engine that is awake, got {self!r}: call wake_up first")
            weights = self._weights or await self._subscribe(url)
            if weights.url != url:
                raise EngineRefused(f"expected weights of {weights.url}, which this engine samples with, got {url}")
            await weights.newer(than=version - 1)
            await self._gate.close("updating")
            try:
                await self._refresh(weights, least=version)
            finally:
                self._gate.open("updating")

    async def _refresh(self, weights: Subscriber, *, least: int) -> None:
        """Bring the model to the newest version, which is `least` or newer, however often the publisher overtakes."""
        while (version := await anyio.to_thread.run_sync(weights.refresh)) < least:
            pass
        self._version = version

    async def _subscribe(self, url: str) -> Subscriber:
        """The subscription is held by a task of its own, so that any task may ask for it."""
        weights: Subscriber = await self._tasks.start(self._hold, url)
        self._weights = weights
        return weights

    async def _hold(self, url: str, *, task_status: TaskStatus[Subscriber]) -> None:
        async with subscriber(url) as weights:
            await anyio.to_thread.run_sync(self._attach, weights)
            task_status.started(weights)
            await anyio.sleep_forever()

    def _attach(self, weights: Subscriber) -> None:
        """As views where the model can see the versions and follows them; else copies, which nobody writes over."""
        model = self._model
        devices = {str(parameter.device) for parameter in model.parameters()}
        if not isinstance(model, torch.nn.Module):
            weights.attach(model.state_dict())
        else:
            weights.attach(model, copied=not (self._follows and devices <= {weights.device, "meta"}))

    async def pause(self) -> None:
        """Sample nothing more until `resume`; returns when the batch that runs is done."""
        await self._gate.close("paused")

    async def resume(self) -> None:
        """End the pause."""
        self._gate.open("paused")

    async def sleep(self) -> None:
        """As `pause`, until `wake_up`, and let go of the memory of weights that are published and can be read again."""
        async with self._one_at_a_time:
            await self._gate.close("asleep")
            if self._weights is not None:
                self._let_go = self._let_go or {storage: storage.nbytes() for storage in _storages(self._model)}
                for storage in self._let_go:
                    storage.resize_(0)
                if self._let_go:
                    self._weights.detach()  # `wake_up` attaches anew
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
                self._weights.attach(self._model.state_dict())  # its tables were compared when it was new
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


class _Overtaken(Exception):
    """The publisher wrote over the weights that a batch was being sampled with: what was sampled is void."""


def _completions(sampled: Sampled) -> Iterator[Completion]:
    *rows, versions = sampled
    for tokens, logprobs, length, ended in zip(*rows, strict=True):
        yield Completion(
            tokens=tokens[:length],
            logprobs=logprobs[:length],
            stop_reason=StopReason.STOP if ended else StopReason.LENGTH,
            policy_versions=versions[:length],
        )
