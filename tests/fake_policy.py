"""A policy with given answers, and a tokenizer of one id for each letter, for tests of sources."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock import StopReason, Worker
from penstock.policies import Completion, NoOpEngine, SamplingParams


@dataclass(frozen=True)
class Letters:
    """One id a letter; 0 ends a completion."""

    eos_id: int = 0

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def echo(_: str) -> str:
    return "ok"


async def at_once() -> None:
    """Answer without waiting."""


@dataclass
class FakePolicy(NoOpEngine):
    """Answers a prompt with `answer(prompt)` and the end token, cut at the allowance; token i has logprob −i − 1."""

    answer: Callable[[str], str] = echo
    version: int = 7
    versions: Sequence[int] = ()
    """Version of each call in turn, where they differ."""
    wait: Callable[[], Awaitable[None]] = at_once
    prompts: list[str] = field(default_factory=list)
    requests: list[SamplingParams] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)

    @asynccontextmanager
    async def open(self, worker: Worker) -> AsyncGenerator[FakePolicy]:
        self.workers.append(worker)
        yield self

    async def generate(
        self,
        prompts: Sequence[NDArray[np.int32]],
        sampling: SamplingParams,
    ) -> list[Completion]:
        version = self.versions[len(self.prompts)] if self.versions else self.version
        texts = [Letters().decode(prompt.tolist()) for prompt in prompts]
        self.prompts += texts
        self.requests.append(sampling)
        await self.wait()
        return [completion_of(self.answer(text), sampling.max_completion_tokens, version) for text in texts]


def completion_of(text: str, max_completion_tokens: int = 99, version: int = 7) -> Completion:
    """Return the completion of `text` and the end token, cut at `max_completion_tokens`."""
    tokens = np.array([*Letters().encode(text), 0][:max_completion_tokens], np.int32)
    return Completion(
        tokens=tokens,
        logprobs=-np.arange(1, len(tokens) + 1, dtype=np.float32),
        stop_reason=StopReason.STOP if tokens[-1] == 0 else StopReason.LENGTH,
        policy_versions=np.full(len(tokens), version, np.int64),
    )
