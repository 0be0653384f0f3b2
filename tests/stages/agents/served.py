"""An endpoint with rollouts of a real engine, or of a script, and a client that speaks HTTP."""

from __future__ import annotations

import io
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray
from tests.models_hf.chat_templates import QWEN, tokenizer_folder
from tests.tiny_model import TinyModel

from penstock import StopReason, Worker
from penstock._stages.agents.endpoint.agent_endpoint import AgentEndpoint
from penstock._stages.agents.endpoint.served_rollout import ServedRollout
from penstock._stages.contracts.policies import Call
from penstock.agents import AgentClient
from penstock.chat import ChatFormat
from penstock.policies import Completion, Engine, PretrainedTokenizer, SamplingParams
from penstock.torch import TorchPolicy

MAX_TOKENS = 12
CONTEXT = 4096


def chat_format(folder: Path, template: str = QWEN, **options: Any) -> ChatFormat:
    """Return the format of a tokenizer of bytes."""
    return ChatFormat(PretrainedTokenizer(tokenizer_folder(folder / "tokenizer", template)), **options)


@dataclass(eq=False)
class Rollout:
    """Records what was asked and sampled; `sample` returns the completion of a prompt."""

    sample: Callable[[NDArray[np.int32], SamplingParams], Any]
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_completion_tokens=MAX_TOKENS))
    asked: list[tuple[NDArray[np.int32], SamplingParams]] = field(default_factory=list)
    calls: list[tuple[NDArray[np.int32], Call]] = field(default_factory=list)
    rewards: list[tuple[float, str | None]] = field(default_factory=list)

    def add_reward(self, value: float, call: str | None) -> None:
        self.rewards.append((value, call))

    def another(self) -> AgentClient:
        raise NotImplementedError

    async def generate(self, prompt: NDArray[np.int32], sampling: SamplingParams | None = None) -> Call:
        params = sampling or self.sampling
        name = f"call-{len(self.asked)}"
        self.asked.append((prompt, params))
        completion = await self.sample(prompt, params)
        fields = {name: getattr(completion, name) for name in Completion.__struct_fields__}
        call = Call(id=name, temperature=params.logprob_temperature, **fields)
        self.calls.append((prompt, call))
        return call


def of_engine(engine: Engine, **options: Any) -> Rollout:
    """Return a rollout that a real engine samples."""

    async def sample(prompt: NDArray[np.int32], sampling: SamplingParams) -> Completion:
        (completion,) = await engine.generate([prompt], sampling)
        return completion

    return Rollout(sample, **options)


def of_script(chat: ChatFormat, *texts: str | Exception, **options: Any) -> Rollout:
    """Return a rollout that says one text after another, each with the end of a turn, or raises."""
    left = list(texts)

    async def sample(*_: object) -> Completion:
        said = left.pop(0)
        if isinstance(said, Exception):
            raise said
        return completion_of(chat, said)

    return Rollout(sample, **options)


def completion_of(chat: ChatFormat, text: str, *, end: bool = True) -> Completion:
    """Return a completion with this text."""
    tokens = [*chat.tokenizer.encode(text), *([chat.tokenizer.eos_id] if end else [])]
    return Completion(
        tokens=np.array(tokens, np.int32),
        logprobs=np.linspace(-1, -2, len(tokens), dtype=np.float32),
        stop_reason=StopReason.STOP if end else StopReason.LENGTH,
        policy_versions=np.zeros(len(tokens), np.int64),
    )


@asynccontextmanager
async def engine_of(chat: ChatFormat) -> AsyncGenerator[Engine]:
    """Open a tiny random model with the tokenizer's vocabulary."""
    vocabulary = 300
    policy = TorchPolicy(lambda: TinyModel(vocabulary=vocabulary, context=CONTEXT), chat.tokenizer.eos_id)
    async with policy.open(Worker()) as engine:
        yield engine


@dataclass(eq=False)
class Client:
    """Talks to one rollout."""

    session: aiohttp.ClientSession
    endpoint: AgentEndpoint
    served: ServedRollout

    async def post(
        self, path: str, body: Any, *, headers: Mapping[str, str] | None = None, url: str | None = None
    ) -> tuple[int, Any]:
        """Return the status and the JSON of an answer, or its events."""
        data = io.BytesIO(body if isinstance(body, bytes) else msgspec.json.encode(body))
        async with self.session.post((url or self.served.base_url) + path, data=data, headers=headers or {}) as came:
            text = await came.read()
            if came.headers["content-type"].startswith("text/event-stream"):
                return came.status, events_in(text)
            return came.status, msgspec.json.decode(text)

    async def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Any:
        """Return the answer of /chat/completions, which must be 200."""
        status, answer = await self.post("/chat/completions", {"messages": messages, **fields})
        assert status == 200, answer
        return answer

    async def refused(self, path: str, body: Any, **options: Any) -> tuple[int, dict[str, Any]]:
        """Return the status and the error of a refusal."""
        status, answer = await self.post(path, body, **options)
        assert set(answer) <= {"error", "type"}
        return status, answer["error"]


def events_in(stream: bytes) -> list[Any]:
    """Return the events of a stream; names of events come before their data."""
    found: list[Any] = []
    for block in stream.decode().split("\n\n"):
        for line in block.split("\n"):
            name, _, value = line.partition(": ")
            if name == "data":
                found.append(value if value == "[DONE]" else msgspec.json.decode(value))
    return found


@asynccontextmanager
async def serving(chat: ChatFormat, rollout: Rollout, **options: Any) -> AsyncGenerator[Client]:
    """Serve one rollout."""
    async with AgentEndpoint(chat, **options) as endpoint, aiohttp.ClientSession() as session:
        with endpoint.serve(rollout) as served:
            yield Client(session, endpoint, served)
