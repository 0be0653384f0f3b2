"""The protocols of policies: prompts in, completions with log-probabilities and versions out.

A `Policy` is a picklable description; each worker calls `open` to create its `Engine`. The sampler calls `generate`
only; the trainer's side updates the weights, pauses, and releases memory. Knows no environment and no framework:
`TorchPolicy` is in `torch_policy.py`, `HttpPolicy` in `http_policy.py`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..._pipeline.errors import InvalidConfig, PenstockError
from ..._pipeline.graph.context import Worker
from ..._schemas import StopReason
from .sampling_params import SamplingParams


class GenerationIsOutside(PenstockError):
    """A completion was requested of a NoOpPolicy: in its runs an external system samples."""


class Tokenizer(Protocol):
    """A tokenizer: text to token ids and back."""

    @property
    def eos_id(self) -> int:
        """Return the token that ends a completion; a tokenizer that has several has `end_ids` too."""
        ...

    def encode(self, text: str, /) -> Sequence[int]:
        """Return the ids of `text`, with no token added at either end."""
        ...

    def decode(self, ids: Sequence[int], /) -> str:
        """Return the text of `ids`."""
        ...


class Completion(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """C tokens that the policy sampled for one prompt."""

    tokens: NDArray[np.int32]
    """[C] sampled ids, the token that ends it included where it was sampled."""
    logprobs: NDArray[np.float32] | None
    """[C] log-probability of each at the temperature of the sampling, before truncation and repetition penalty, or over
    `support_ids` where they are kept; None if unknown."""
    stop_reason: StopReason
    """STOP after a token that ends a completion or a stop string, LENGTH at `max_completion_tokens`."""
    policy_versions: NDArray[np.int64]
    """[C] version (optimizer step) of the weights that sampled each."""
    routed_experts: NDArray[np.uint8] | NDArray[np.uint16] | None = None
    """[P + C, L, E] experts that each layer of a mixture chose for tokens of the prompt and of the completion; zeros
    for those without a record. None where the engine records none."""
    support_ids: NDArray[np.int32] | None = None
    """[C, W] the tokens that each was drawn from, −1 where there are fewer; None unless they are kept."""


class Call(Completion, frozen=True, kw_only=True, eq=False):
    """A completion that an agent asked for, with parameters of its own."""

    id: str
    """Unique in its rollout."""
    temperature: float
    """That of its log-probabilities."""


class Engine(Protocol):
    """An opened policy. Every method may be called by any task."""

    async def generate(self, prompts: Sequence[NDArray[np.int32]], sampling: SamplingParams) -> list[Completion]:
        """Return one completion for each prompt, in order. Prompts of concurrent calls may be sampled together.

        Args:
            prompts: [P] token ids each, at least one.
            sampling: the bound on each completion, and how its tokens are drawn.
        """
        ...

    async def update_weights(self, url: str, version: int) -> None:
        """Use the weights published at `url`, of `version` or newer, for all later completions.

        Returns when they are loaded. Completions in flight are finished first, with the weights that they began with;
        an engine that updates in flight continues them, and reports the version of each token.
        """
        ...

    async def pause(self) -> None:
        """Stop sampling until `resume`; return when no completion is in flight. Later requests wait."""
        ...

    async def resume(self) -> None:
        """End the pause, if there is one."""
        ...

    async def sleep(self) -> None:
        """Pause until `wake_up`, and release the memory that `wake_up` can restore."""
        ...

    async def wake_up(self) -> None:
        """Restore the memory and end the pause, if the engine sleeps."""
        ...


@runtime_checkable
class FollowsWeights(Protocol):
    """An engine that samples with the newest published weights. These may arrive later than the news of them."""

    async def arrived(self, version: int) -> None:
        """Wait until later completions are sampled with weights of `version` or newer."""
        ...


@runtime_checkable
class Seeded(Protocol):
    """A policy that samples here: `SourceEnv` derives a seed for each turn of each rollout from its own."""

    @property
    def seed(self) -> int:
        """Return the seed of its random numbers."""
        ...


@runtime_checkable
class RecordsRoutes(Protocol):
    """A policy that can record the experts of a mixture, as `Completion.routed_experts`."""

    @property
    def routed_experts(self) -> object:
        """Return a true value if it does."""
        ...


class Policy(Protocol):
    """A picklable description of an engine."""

    def open(self, worker: Worker, /) -> AbstractAsyncContextManager[Engine]:
        """Load weights and start an engine that samples until the body ends. Seeds differ from worker to worker."""
        ...


@dataclass(frozen=True, slots=True)
class NoOpPolicy:
    """A policy without weights, for an external system that samples.

    Its environments return finished rollouts (`environments.OutsideEnvironment`); requesting a completion raises
    `GenerationIsOutside`.
    """

    @asynccontextmanager
    async def open(self, worker: Worker) -> AsyncGenerator[Engine]:  # noqa: ARG002 (a policy may need to know)
        """Yield a NoOpEngine."""
        yield NoOpEngine()


class NoOpEngine:
    """An engine without weights, for an external system that samples.

    To write an engine whose weights never change, subclass it and define `generate`.
    """

    async def generate(
        self,
        prompts: Sequence[NDArray[np.int32]],
        sampling: SamplingParams,  # noqa: ARG002 (the protocol's)
    ) -> list[Completion]:
        """Raise GenerationIsOutside.

        Raises:
            GenerationIsOutside: always.
        """
        raise GenerationIsOutside(
            f"expected no request for completions where the policy is a NoOpPolicy, got {len(prompts)} prompts: "
            f"use an environment with a `rollout` method, or a policy that samples"
        )

    async def update_weights(self, url: str, version: int) -> None:
        """Do nothing."""

    async def pause(self) -> None:
        """Do nothing."""

    async def resume(self) -> None:
        """Do nothing."""

    async def sleep(self) -> None:
        """Do nothing."""

    async def wake_up(self) -> None:
        """Do nothing."""


def check_positions(prompts: Sequence[NDArray[np.int32]], completion: int, positions: int | None) -> None:
    """Check that a model of so many `positions` has one for each token of a prompt and a `completion`.

    Raises:
        InvalidConfig: it has fewer.
    """
    if positions is None:
        return
    for row, prompt in enumerate(prompts):
        if len(prompt) + completion > positions:
            raise InvalidConfig(
                f"prompt {row}: expected at most {positions} tokens with its completion, the positions of the model, "
                f"got {len(prompt)} and max_completion_tokens={completion}: lower it, or shorten the prompt"
            )


def check_prompts(prompts: Sequence[NDArray[np.int32]], vocabulary: int | None = None) -> None:
    """Check the prompts of `Engine.generate`, and their tokens if the `vocabulary` of the model is known.

    Raises:
        InvalidConfig: one is empty, or has a token that the model does not have.
    """
    if not all(len(prompt) for prompt in prompts):
        raise InvalidConfig(
            f"expected prompts of at least one token, got lengths {[len(prompt) for prompt in prompts]}"
        )
    if vocabulary is not None and prompts and (highest := max(int(prompt.max()) for prompt in prompts)) >= vocabulary:
        raise InvalidConfig(
            f"expected prompts of tokens below {vocabulary}, the rows of the model's embedding, got token {highest}: "
            f"the tokenizer has tokens that the model lacks; use the model's own, or save the model with a larger "
            f"embedding (model.resize_token_embeddings)"
        )
