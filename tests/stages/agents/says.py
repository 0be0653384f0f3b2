"""A policy that says one thing."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace
from numpy.typing import NDArray
from tests.stages.agents.served import completion_of

from penstock import Worker
from penstock.chat import ChatFormat
from penstock.policies import Completion, NoOpEngine, SamplingParams


@dataclass(frozen=True)
class Says(NoOpEngine):
    """Answers 4 to everything."""

    chat: ChatFormat

    @asynccontextmanager
    async def open(self, _: Worker) -> AsyncGenerator[Says]:
        yield self

    async def generate(self, prompts: Sequence[NDArray[Any]], sampling: SamplingParams) -> list[Completion]:
        said = completion_of(self.chat, "4")
        return [bounded(said, sampling.max_completion_tokens) for _ in prompts]


def bounded(said: Completion, tokens: int) -> Completion:
    columns = {name: getattr(said, name)[:tokens] for name in ("tokens", "logprobs", "policy_versions")}
    return replace(said, **columns)
