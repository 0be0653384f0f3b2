"""Agents that call the endpoint beside agents that call the policy: processor time, time, and rows of a batch.

    python -m benchmarks.agents [--turns 8] [--tokens 64] [--threads 1]

64 rollouts of conversations, sampled by TorchPolicy from a Qwen2 model with random weights (4 layers, 256 wide, 8,000
tokens). Direct: `client.generate` with tokens that are known beforehand. Endpoint: chat completions over HTTP from
another process, whose processor time does not count. The two alternate; each ratio is of two neighbours.

Latency: 500 rollouts at once whose policy answers immediately. Rendering: the processor time of turns 120 to 128 of a
conversation from its messages to its record, beside that of sampling a turn directly.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import numpy as np
import torch
import transformers
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream
from numpy.typing import NDArray
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock import SourceEnv, StopReason, TrajectoryGroup, Worker
from penstock._stages.agents.endpoint.served_rollout import ServedRollout
from penstock._stages.contracts.policies import Call
from penstock.agents import AgentClient
from penstock.chat import ChatFormat
from penstock.models import HFModel
from penstock.policies import Completion, Engine, NoOpEngine, PretrainedTokenizer, SamplingParams
from penstock.testing import Driven, drive_source
from penstock.torch import TorchPolicy

from .report import command_line, median_of, print_table, write_json

__all__ = ["main"]

ROLLOUTS, GROUP = 64, 8

MANY = 500

VOCABULARY = 8_000

TURNS_OF_LATENCY = 4

LONG = 128

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

FIRST = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "a question, and all that belongs to it. " * 4},
]

NEXT = {"role": "user", "content": "the result of what you asked for, in a line or two. " * 2}


def main() -> None:
    """Measure, and print the ratios."""
    parser = command_line(__doc__, seconds=None, repeats=5)
    parser.add_argument("--turns", type=int, default=8, help="calls of a rollout")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a completion")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with TemporaryDirectory() as folder:
        chat, model = _chat(Path(folder)), _model(Path(folder))
        found = anyio.run(_measure, chat, model, options)
    rows = [[name, median_of(values, 3)] for name, values in found.items()]
    print_table(Console(), f"Endpoint and direct calls, {options.repeats} repeats", ["", "ratio or value"], rows)
    write_json(options.json, {"agents": found})


def _chat(folder: Path) -> ChatFormat:
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = np.random.default_rng(0).choice(list("abcdefghij"), (20_000, 6))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY - 2, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([" ".join("".join(word) for word in letters)], trainer)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return ChatFormat(PretrainedTokenizer(folder))


def _model(folder: Path) -> HFModel:
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    auto: Any = transformers.AutoModelForCausalLM
    auto.from_config(config).save_pretrained(folder / "model")
    return HFModel.from_pretrained(folder / "model")


async def _measure(chat: ChatFormat, model: HFModel, options: argparse.Namespace) -> dict[str, list[float]]:
    source = partial(
        SourceEnv,
        policy=TorchPolicy(lambda: model, chat.tokenizer.eos_id, max_rows=ROLLOUTS),
        chat=chat,
        group_size=GROUP,
        groups=ROLLOUTS // GROUP,
        concurrency=ROLLOUTS,
        sampling=SamplingParams(max_completion_tokens=options.tokens),
    )
    found: dict[str, list[float]] = {}

    def add(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    async with _clients() as clients:
        for number in range(options.repeats + 1):  # the first is a warm-up
            direct = await _run(source(partial(_Direct, chat, options.turns)))
            served = await _run(source(partial(_Served, clients, options.turns)))
            if number:
                for place, name in enumerate(("processor time", "time", "rows of a batch")):
                    add(f"{ROLLOUTS} rollouts: {name}, endpoint / direct", served[place] / direct[place])
                call = direct[0] / (ROLLOUTS * options.turns)
                add("direct: processor time of a call, ms", 1000 * call)
                add(f"rendering at {LONG} turns / sampling", await _rendering(chat, options.tokens) / call)
                await drive_source(_of_many(chat, partial(_Served, clients, TURNS_OF_LATENCY), options.tokens))
                add(f"{MANY} rollouts: p99 / p50", clients.p99_of_p50())
    return found


async def _run(source: SourceEnv) -> tuple[float, float, float]:
    """Return processor time, time, and rows of a batch."""
    used, began = time.process_time(), time.perf_counter()
    ran: Driven[TrajectoryGroup] = await drive_source(source)
    took = time.process_time() - used, time.perf_counter() - began
    return *took, ran.metrics.emit(0)["rollout/rows_per_batch"]


# -- agents ------------------------------------------------------------------------------------------------------------


class _Direct:
    """Calls the policy with tokens; those of its messages are known beforehand."""

    def __init__(self, chat: ChatFormat, turns: int) -> None:
        self._first = np.array(chat.prompt(FIRST), np.int32)
        said = [*FIRST, {"role": "assistant", "content": "yes"}]
        self._next = np.array(chat.extend(said, [NEXT]), np.int32)
        self._turns = turns

    async def drive(self, task: int, client: AgentClient) -> float:
        prompt: NDArray[np.int32] = self._first
        for _ in range(self._turns):
            call = await client.generate(prompt)
            prompt = np.concatenate([prompt, call.tokens, self._next])
        return float(task % 2)


class _Served:
    """Has another process call the endpoint."""

    def __init__(self, clients: _Clients, turns: int) -> None:
        self._clients = clients
        self._turns = turns

    async def drive(self, task: int, client: AgentClient) -> float:
        await self._clients.converse(client.base_url, self._turns)
        return float(task % 2)


class _Clients:
    """A process of clients."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._waiting: dict[str, anyio.Event] = {}
        self.latencies: list[float] = []

    async def converse(self, url: str, turns: int) -> None:
        """Have a conversation over HTTP."""
        ended = self._waiting[url] = anyio.Event()
        stdin: Any = self._process.stdin
        await stdin.send(json.dumps([url, turns, FIRST, NEXT]).encode() + b"\n")
        await ended.wait()

    async def hear(self) -> None:
        """Note the ends of conversations."""
        stdout: Any = self._process.stdout
        rest = ""
        async for text in TextReceiveStream(stdout):
            *lines, rest = (rest + text).split("\n")
            for line in lines:
                url, latencies = json.loads(line)
                self.latencies += latencies
                self._waiting.pop(url).set()

    def p99_of_p50(self) -> float:
        """Return the ratio of the latencies since they were cleared."""
        return float(np.percentile(self.latencies[-MANY * TURNS_OF_LATENCY :], 99)) / statistics.median(
            self.latencies[-MANY * TURNS_OF_LATENCY :]
        )


@asynccontextmanager
async def _clients() -> AsyncGenerator[_Clients]:
    command = [sys.executable, "-m", "benchmarks.agents_clients"]
    async with await anyio.open_process(command, stderr=None) as process, anyio.create_task_group() as tasks:
        clients = _Clients(process)
        tasks.start_soon(clients.hear)
        yield clients
        tasks.cancel_scope.cancel()
        process.kill()


# -- latency and rendering ---------------------------------------------------------------------------------------------


class _Answers(NoOpEngine):
    """A policy that answers at once."""

    def __init__(self, tokens: int) -> None:
        self._completion = _completion(tokens)

    @asynccontextmanager
    async def open(self, worker: Worker) -> AsyncGenerator[Engine]:  # noqa: ARG002 (the protocol's)
        yield self

    async def generate(
        self,
        prompts: Sequence[NDArray[np.int32]],
        sampling: SamplingParams,  # noqa: ARG002 (the protocol's)
    ) -> list[Completion]:
        return [self._completion for _ in prompts]


def _completion(tokens: int) -> Completion:
    return Completion(
        tokens=np.arange(tokens, dtype=np.int32),
        logprobs=np.full(tokens, -1, np.float32),
        stop_reason=StopReason.LENGTH,
        policy_versions=np.zeros(tokens, np.int64),
    )


def _of_many(chat: ChatFormat, make_env: Any, tokens: int) -> SourceEnv:
    return SourceEnv(make_env, _Answers(tokens), chat=chat, group_size=MANY, groups=1, concurrency=MANY)


class _Scripted:
    """A rollout whose calls cost nothing."""

    sampling = SamplingParams()

    def __init__(self, tokens: int) -> None:
        fields = {name: getattr(_completion(tokens), name) for name in Completion.__struct_fields__}
        self._call = Call(id="call-0", temperature=1.0, **fields)

    async def generate(self, prompt: NDArray[np.int32], sampling: SamplingParams | None = None) -> Call:  # noqa: ARG002
        return self._call

    def add_reward(self, value: float, call: str | None) -> None:
        raise NotImplementedError

    def another(self) -> AgentClient:
        raise NotImplementedError


async def _rendering(chat: ChatFormat, tokens: int) -> float:
    """Return the processor time of a turn of a long conversation."""
    served = ServedRollout(_Scripted(tokens), chat, url="")
    said: list[Any] = list(FIRST)
    took = []
    for _ in range(LONG):
        began = time.process_time()
        answer = await served.converse(said, None, served.sampling)
        took.append(time.process_time() - began)
        said += [answer.choices[0].message, NEXT]
    return statistics.median(took[-9:])


if __name__ == "__main__":
    main()
