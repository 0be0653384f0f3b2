"""Print the files and functions of penstock that one subject runs through, in one process.

    python scripts/trace.py group | capacity | stop | death

group: from the question to the environment to the return of `TorchTrainer.step`, in the second of three synchronous
    steps, so that code which runs only once in a process is not counted. The engine is of this script.
capacity: functions that hold the capacity of an edge, from `.then(stage, capacity=…)` to the channel that applies it.
stop: from SIGINT, sent during a step, to the end of `Pipeline.run`, with a checkpoint.
death: from the end of a step to the beginning of the next one, for which a worker that samples is killed by SIGKILL,
    and another one is started in its place. In the process of the trainer.

docs/architecture.md quotes the totals.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
import numpy as np
import torch

from penstock import (
    AdvantageNormalizer,
    Batcher,
    SinkTrainer,
    SourceEnv,
    StopReason,
    TrainBatch,
    Worker,
    current,
    here,
    processes,
    source,
)
from penstock.errors import RunStopped
from penstock.policies import Completion, NoOpEngine, SamplingParams
from penstock.torch import KVCache, TorchTrainer

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"pipeline", "schemas", "stages"}
GROUP_SIZE = 4
CAPACITY = 7919
"""A number that no other value has."""


class Tracer:
    """Records functions of penstock while `tracing` is set, in this thread and in those that start after `install`."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.tracing = subject == "capacity"
        self.functions: defaultdict[str, set[str]] = defaultdict(set)
        """Qualified names by file."""

    def install(self) -> None:
        """Begin to receive the calls of functions."""
        threading.setprofile(self._record)
        sys.setprofile(self._record)

    def _record(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if not self.tracing or event not in ("call", "return") or code.co_name.startswith("<"):
            return
        file = file_of(code.co_filename)
        if file is not None and (self.subject != "capacity" or (event == "return" and holds_capacity(frame))):
            self.functions[file].add(code.co_qualname)


@cache
def file_of(name: str) -> str | None:
    """Return the path from the repository to a file in `FOLDERS`; None for any other file."""
    path = Path(name).resolve()
    inside = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in FOLDERS
    return str(path.relative_to(ROOT)) if inside else None


def holds_capacity(frame: FrameType) -> bool:
    """Return whether a local variable is `CAPACITY`, or has it as an attribute."""
    held = list(frame.f_locals.values())
    held += [getattr(value, name, None) for value in held for name in ("capacity", "_capacity")]
    return any(type(value) is int and value == CAPACITY for value in held)


tracer = Tracer(sys.argv[1] if len(sys.argv) > 1 else "group")


class Digits:
    """A scored data set; its second question starts the trace."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, str]:
        tracer.tracing = tracer.tracing or (tracer.subject == "group" and index == 1)
        return {"question": f"{index}", "answer": f"{index}"}

    def score_answer(self, answer: str, entry: dict[str, str]) -> float:
        """Return 0 for the right answer, and less the further away one is: three steps of any answers learn."""
        return -abs(float(answer) - float(entry["answer"]))


class Characters:
    """A tokenizer with one token for each character; 0 ends an answer."""

    eos_id = 0

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`."""
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""
        return "".join(map(chr, ids))


class Guesses(NoOpEngine):
    """A policy that is its own engine: it samples one digit, uniformly, with the version of the current step.

    A deadly one ends its process instead, after the first step.
    """

    def __init__(self, *, deadly: bool) -> None:
        self._deadly = deadly

    @asynccontextmanager
    async def open(self, worker: Worker) -> AsyncIterator[Guesses]:
        """Return the engine."""
        self._random = np.random.default_rng(worker.index)
        yield self

    async def generate(
        self,
        prompts: Sequence[Any],
        sampling: SamplingParams,  # noqa: ARG002 (of the protocol)
    ) -> list[Completion]:
        """Return a digit for each prompt."""
        if self._deadly and current().ledger.step == 1 and not current().worker.restart:
            os.kill(os.getpid(), signal.SIGKILL)
        return [
            Completion(
                tokens=np.array([ord("0") + self._random.integers(10), 0], np.int32),
                logprobs=np.array([np.log(0.1), 0], np.float32),
                stop_reason=StopReason.STOP,
                policy_versions=np.full(2, current().ledger.step),
            )
            for _ in prompts
        ]


class Bigrams(torch.nn.Module):
    """A model without attention: the next token depends on the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(128, 128)

    def forward(self, tokens: torch.Tensor, **_: Any) -> torch.Tensor:
        """Return logits."""
        logits: torch.Tensor = self.table(tokens)
        return logits

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Return a cache of no width."""
        return KVCache(layers=1, batch=batch, heads=1, capacity=capacity, width=0)


class TracedTrainer(TorchTrainer):
    """A trainer whose second step ends the trace of a group or a death, or begins that of a stop."""

    def step(self, batch: TrainBatch) -> dict[str, float]:
        """Train on `batch`."""
        if tracer.subject == "stop" and self.steps == 1:
            tracer.tracing = True
            os.kill(os.getpid(), signal.SIGINT)
        if tracer.subject == "death":
            tracer.tracing = False
        metrics = super().step(batch)
        if tracer.subject == "group":
            tracer.tracing = False
        tracer.tracing = tracer.tracing or (tracer.subject == "death" and self.steps == 1)
        return metrics


async def main(folder: str) -> None:
    """Train three groups, one in each step."""
    trainer = TracedTrainer(Bigrams(), optimizer=partial(torch.optim.SGD, lr=0.1))
    dies = tracer.subject == "death"
    guesses = Guesses(deadly=dies)
    env = SourceEnv(Digits, guesses, Characters(), group_size=GROUP_SIZE, groups=3)
    await (
        source(env, on=processes(1) if dies else here(), max_lag=0)
        .then(AdvantageNormalizer("grpo"), capacity=CAPACITY)
        .then(Batcher(max_tokens=64, sequences=GROUP_SIZE))
        .sink(SinkTrainer(trainer, checkpoints=folder))
        .run()
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print the files and functions that one thing runs through.")
    parser.add_argument("subject", choices=["group", "capacity", "stop", "death"])
    parser.parse_args()
    tracer.install()
    with tempfile.TemporaryDirectory() as folder, suppress(RunStopped):
        anyio.run(main, folder)
    sys.setprofile(None)
    for file, names in sorted(tracer.functions.items()):
        sys.stdout.write(f"{file}: {', '.join(sorted(names))}\n")
    total = sum(map(len, tracer.functions.values()))
    sys.stdout.write(f"{len(tracer.functions)} files, {total} functions\n")
