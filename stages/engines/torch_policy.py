"""`TorchPolicy`: the recipe for sampling a torch model in the process that wants completions.

The engine that it opens is in `torch_engine`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

import anyio
import anyio.to_thread

from ..._pipeline.context import Worker
from ..._schemas.numbers import normalize_counts
from ..training.causal_model import CausalModel
from .policies import Engine
from .torch_engine import TorchEngine, as_seed

__all__ = ["TorchPolicy", "WeightUpdates"]

WeightUpdates: TypeAlias = Literal["between_batches", "in_flight"]
"""When other weights are taken up: a batch is sampled with one version as a whole, or every token with the newest."""


@dataclass(frozen=True, slots=True)
class TorchPolicy:
    """A recipe for sampling a torch model."""

    make_model: Callable[[], CausalModel]
    """Makes the model, in the process that samples; a module-level function, so that the recipe can be pickled."""
    eos_id: int
    """The token that ends a completion."""
    weights: str | None = None
    """URL of the WeightPublisher (or WeightFolder) whose newest version every batch begins with; without one the model
    stays as it was made, version 0, until `update_weights` brings others."""
    seed: int = 0
    """Makes sampling repeatable where the order of requests is; every worker draws numbers of its own, and with every
    version of the weights others."""
    max_rows: int = 256
    """Rows of one batch at most: bounds the memory of the cache."""
    weight_updates: WeightUpdates = "between_batches"
    """`in_flight`: a completion goes on with newer weights as soon as there are some, on the keys and values that the
    older ones computed, and `policy_versions` says which sampled each token; a pause does not wait for its end."""

    def __post_init__(self) -> None:
        normalize_counts(self, "max_rows")

    @asynccontextmanager
    async def open(self, worker: Worker) -> AsyncGenerator[Engine]:
        """Make the model and answer requests until the body ends."""
        model = await anyio.to_thread.run_sync(self.make_model)
        model.train(False)
        stack = AsyncExitStack()
        try:
            tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(tasks.cancel_scope.cancel)
            engine = TorchEngine(
                model,
                tasks,
                self.eos_id,
                _seed(self.seed, worker),
                self.max_rows,
                in_flight=self.weight_updates == "in_flight",
            )
            stack.callback(engine.close)
            if self.weights is not None:
                await engine.follow(self.weights)
            tasks.start_soon(engine.serve)
            yield engine
        finally:
            await stack.aclose()  # and no `async with`: the task group would wrap what the body raises


def _seed(seed: int, worker: Worker) -> int:
    """A seed of its own for every worker, also after a restart."""
    return as_seed([seed, worker.index, worker.restart])
