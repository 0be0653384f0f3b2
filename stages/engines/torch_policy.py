"""`TorchPolicy`: the description of sampling a torch model in the process of the sampler.

The engine that it opens is in `torch_engine`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import anyio
import anyio.to_thread
import torch

from ..._pipeline.errors import InvalidConfig
from ..._pipeline.graph.context import Worker, current
from ..._pipeline.util.user_code import call_user
from ..._pipeline.weights.weight_address import WeightAddress
from ..._schemas.choices import check_choice
from ..._schemas.numbers import normalize_counts
from ..contracts.autocast import check_autocast
from ..contracts.causal_model import CausalModel
from ..contracts.policies import Engine
from ..contracts.sampling_params import as_seed
from ..tokenizers.end_tokens import HasEndTokens
from .torch_engine import TorchEngine

WeightUpdates: TypeAlias = Literal["between_batches", "in_flight"]
"""The moment to load newer weights: each batch is sampled with one version, or every token with the newest."""


@dataclass(frozen=True, slots=True)
class TorchPolicy:
    """A picklable description of sampling a torch model."""

    make_model: Callable[[], CausalModel]
    """Makes the model in the process that samples; a module-level function, so that the policy can be pickled."""
    eos_id: int | None = None
    """A token that ends a completion, beside those of the model and of `SamplingParams.stop_ids`; by default that of
    the pipeline's tokenizer; its `end_ids` end completions too."""
    weights: str | WeightAddress | None = None
    """URL of the WeightPublisher (or WeightFolder), whose newest version every batch begins with; or the address that
    `WeightPublisher.serve` yields, for samplers on any host; without one the model keeps its initial weights, version
    0, until `update_weights`."""
    seed: int = 0
    """Makes sampling repeatable. `SourceEnv` derives the random numbers of a rollout from it, the number of its prompt
    and its repetition, so that they are the same in any worker. Those of other requests depend on their order, on the
    worker and on the version of the weights."""
    max_rows: int = 256
    """Bound on the rows of a batch, and so on the memory of the cache."""
    weight_updates: WeightUpdates = "between_batches"
    """`in_flight`: a completion continues with newer weights as soon as they are published, on the keys and values of
    the older ones; `policy_versions` has the version of each token; a pause does not wait for its end."""
    autocast: torch.dtype | None = None
    """The dtype of the model's safe operations, that of the `TorchTrainer`: log-probabilities of another one make each
    ratio differ from 1."""
    routed_experts: bool = False
    """True to record the experts that a mixture chooses for each token, as column `routed_experts`, for a trainer with
    `router_replay="R3"`."""

    def __post_init__(self) -> None:
        check_autocast("TorchPolicy", self.autocast)
        check_choice("weight_updates", self.weight_updates, WeightUpdates)
        normalize_counts(self, "max_rows")
        normalize_counts(self, "eos_id", "seed", least=0)

    @asynccontextmanager
    async def open(self, worker: Worker) -> AsyncGenerator[Engine]:
        """Make the model, and yield an engine that samples until the body ends.

        Raises:
            InvalidConfig: no token is known to end a completion, or the model has no experts to record.

        Workers of one stage share the processors of a host: each uses its part of the threads that torch would use.
        `make_model` may set another number.
        """
        if worker.on_host > 1:
            torch.set_num_threads(max(1, torch.get_num_threads() // worker.on_host))
        model = await anyio.to_thread.run_sync(call_user, self.make_model)
        model.train(False)
        tokenizer = current().tokenizer
        stack = AsyncExitStack()
        try:
            tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(tasks.cancel_scope.cancel)
            engine = TorchEngine(
                model,
                tasks,
                self._end_ids(model, tokenizer),
                as_seed([self.seed, worker.index, worker.restart]),  # differs after a restart too
                self.max_rows,
                in_flight=self.weight_updates == "in_flight",
                tokenizer=tokenizer,
                autocast=self.autocast,
                routed_experts=self.routed_experts,
            )
            stack.callback(engine.close)
            if self.weights is not None:
                await engine.follow(self.weights)
            tasks.start_soon(engine.serve)
            yield engine
        finally:
            await stack.aclose()  # not `async with`: the task group would wrap exceptions of the body

    def _end_ids(self, model: CausalModel, tokenizer: Any) -> frozenset[int]:
        eos_id = self.eos_id if tokenizer is None or self.eos_id is not None else tokenizer.eos_id
        if eos_id is None:
            raise InvalidConfig("TorchPolicy.eos_id: expected one, because no stage states a tokenizer, got none")
        return frozenset({eos_id}).union(
            *(each.end_ids for each in (tokenizer, model) if isinstance(each, HasEndTokens))
        )
