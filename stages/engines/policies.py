"""What a policy is to the rest of penstock: prompts in, completions with log-probabilities and versions out.

A `Policy` is a recipe that can be pickled; `open` makes an `Engine` of it inside the process that samples. Whoever
samples calls `generate` and nothing else; whoever trains says when there are newer weights, when to stop and when to
let go of memory. Knows no environment and no framework: `TorchPolicy` lives in `torch_policy.py`, `HttpPolicy` in
`http_policy.py`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..._pipeline.context import Worker
from ..._pipeline.errors import PenstockError
from ..._schemas import StopReason

__all__ = [
    "Completion",
    "Engine",
    "GenerationIsOutside",
    "NoOpEngine",
    "NoOpPolicy",
    "Policy",
    "Tokenizer",
    "check_request",
]


class GenerationIsOutside(PenstockError):
    """A NoOpPolicy was asked for completions: in its runs somebody else samples."""


class Tokenizer(Protocol):
    """Text to token ids and back. Any tokenizer with these three fits."""

    @property
    def eos_id(self) -> int:
        """The token that ends a completion."""
        ...

    def encode(self, text: str, /) -> Sequence[int]:
        """The ids of `text`, with no token added at either end."""
        ...

    def decode(self, ids: Sequence[int], /) -> str:
        """The text of `ids`."""
        ...


class Completion(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What the policy said to one prompt; C tokens."""

    tokens: NDArray[np.int32]
    """[C] sampled ids, the end-of-sequence token included where it was sampled."""
    logprobs: NDArray[np.float32] | None
    """[C] log-probability of each under the distribution it was drawn from; none where whoever sampled does not say."""
    stop_reason: StopReason
    """STOP after the end-of-sequence token, LENGTH where the allowance ran out."""
    policy_versions: NDArray[np.int64]
    """[C] optimizer step of the weights that sampled each."""


class Engine(Protocol):
    """An opened policy: what samples, and what whoever trains can ask of it. Every method may be called by any task."""

    async def generate(
        self,
        prompts: Sequence[NDArray[np.int32]],
        *,
        max_completion_tokens: int,
        temperature: float = 1.0,
        greedy: bool = False,
    ) -> list[Completion]:
        """One completion a prompt, in order. Many tasks may call it at once, and are sampled together.

        Args:
            prompts: [P] token ids each, at least one.
            max_completion_tokens: what a completion may have at most, the end-of-sequence token included.
            temperature: divides the logits; `logprobs` are those of the tempered distribution.
            greedy: take the most probable token; `temperature` is left aside, and `logprobs` are the model's own.
        """
        ...

    async def update_weights(self, url: str, version: int) -> None:
        """Sample whatever is begun from now on with the weights published at `url`, of `version` or newer.

        Returns when they are in place. A completion that is being sampled is finished first, with the weights that it
        began with; an engine that was made to update in flight goes on with it, and says which version sampled what.
        """
        ...

    async def pause(self) -> None:
        """Sample nothing more until `resume`; returns when nothing is being sampled. What is asked meanwhile waits."""
        ...

    async def resume(self) -> None:
        """End the pause; where there is none, do nothing."""
        ...

    async def sleep(self) -> None:
        """As `pause`, until `wake_up`, and let go of the memory that `wake_up` can fill again."""
        ...

    async def wake_up(self) -> None:
        """Take the memory back; where the engine is awake, do nothing."""
        ...


class Policy(Protocol):
    """A recipe for an engine."""

    def open(self, worker: Worker, /) -> AbstractAsyncContextManager[Engine]:
        """Load weights, start what has to run, and sample until the body ends. Seeds differ from worker to worker."""
        ...


@dataclass(frozen=True, slots=True)
class NoOpPolicy:
    """For runs whose generation is outside: it holds no weights and samples nothing.

    Its environments bring finished rollouts (`environments.OutsideEnvironment`); one that waits for completions gets
    `GenerationIsOutside`.
    """

    @asynccontextmanager
    async def open(self, worker: Worker) -> AsyncGenerator[Engine]:  # noqa: ARG002 (a policy may need to know)
        """There is nothing to open."""
        yield NoOpEngine()


class NoOpEngine:
    """An engine for runs whose generation is outside: there are no weights here, nothing to stop, nothing to let go of.

    An engine of your own whose weights never change is a `NoOpEngine` with a `generate`.
    """

    async def generate(
        self,
        prompts: Sequence[NDArray[np.int32]],
        *,
        max_completion_tokens: int,  # noqa: ARG002 (the protocol's)
        temperature: float = 1.0,  # noqa: ARG002 (the protocol's)
        greedy: bool = False,  # noqa: ARG002 (the protocol's)
    ) -> list[Completion]:
        """Refuse.

        Raises:
            GenerationIsOutside: always.
        """
        raise GenerationIsOutside(
            f"expected no request for completions where the policy is a NoOpPolicy, got {len(prompts)} prompts: "
            f"use an environment with a `rollout` method, or a policy that samples"
        )

    async def update_weights(self, url: str, version: int) -> None:
        """Leave it to whoever samples."""

    async def pause(self) -> None:
        """Leave it to whoever samples."""

    async def resume(self) -> None:
        """Leave it to whoever samples."""

    async def sleep(self) -> None:
        """Leave it to whoever samples."""

    async def wake_up(self) -> None:
        """Leave it to whoever samples."""


def check_request(prompts: Sequence[NDArray[np.int32]], max_completion_tokens: int, temperature: float) -> None:
    """Refuse what no engine can generate.

    Raises:
        ValueError: a prompt is empty, or `max_completion_tokens` or `temperature` is not above 0.
    """
    if max_completion_tokens < 1 or temperature <= 0 or not all(len(prompt) for prompt in prompts):
        lengths = [len(prompt) for prompt in prompts]
        raise ValueError(
            f"expected prompts of at least one token, max_completion_tokens >= 1 and temperature > 0, "
            f"got lengths {lengths}, max_completion_tokens={max_completion_tokens}, temperature={temperature}"
        )
