"""A run that evaluates: additions, a policy that gives wrong answers to some, and a trainer that only counts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from tests.fake_policy import Letters, completion_of

from penstock import Batcher, Pipeline, SinkTrainer, SourceEnv, TrainBatch, Worker, current, here, source
from penstock.accounting import Ledger, Metrics
from penstock.policies import Completion, NoOpEngine, SamplingParams
from penstock.training import Evaluation

GROUPS, GROUP_SIZE = 4, 2

LETTERS = Letters()

SAMPLED: dict[str, Any] = {"samples": 4, "sampling": SamplingParams(temperature=1.0)}
"""The parameters of an evaluation with several completions of each prompt."""


@dataclass(frozen=True)
class Sums:
    """`first`+1=, and so on."""

    first: int = 0
    count: int = 10**6

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"question": f"{self.first + index}+1=", "answer": str(self.first + index + 1)}

    def score_answer(self, answer: str, entry: Mapping[str, Any]) -> float:
        return float(answer == entry["answer"])


class Broken(Sums):
    def score_answer(self, answer: str, entry: Mapping[str, Any]) -> float:  # noqa: ARG002 (the protocol's)
        raise ValueError("no score today")


class BrokenForSome(Sums):
    def score_answer(self, answer: str, entry: Mapping[str, Any]) -> float:
        if entry["answer"] == "102":
            raise ValueError("no score for this one")
        return super().score_answer(answer, entry)


@dataclass(frozen=True)
class Adds(NoOpEngine):
    """A policy that adds; a number that a multiple of three is added to gets a wrong answer in odd repetitions."""

    @asynccontextmanager
    async def open(self, worker: Worker) -> AsyncGenerator[Adds]:  # noqa: ARG002 (the protocol's)
        yield self

    async def generate(self, prompts: Sequence[NDArray[np.int32]], sampling: SamplingParams) -> list[Completion]:
        return [self._completion(Letters().decode(prompt.tolist()), sampling) for prompt in prompts]

    def _completion(self, prompt: str, sampling: SamplingParams) -> Completion:
        number = int(prompt.partition("+")[0])
        wrong = number % 3 == 0 and (sampling.greedy or (sampling.seed or 0) % 2 == 1)
        return completion_of(str(number + (2 if wrong else 1)), version=current().ledger.step)


class Counts:
    """A trainer without weights."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[str, int]]] = []

    def step(self, batch: TrainBatch) -> dict[str, float]:
        self.batches.append([(group.id.instance_id, group.sequences) for group in batch.groups])
        return {}


class Lines:
    """The metrics of each step."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def __call__(self, metrics: dict[str, float], step: int) -> None:
        self.lines.append((step, metrics))

    @property
    def evaluations(self) -> dict[int, dict[str, float]]:
        """Return the metrics of each evaluation, by the step that was evaluated."""
        found = [
            {name: value for name, value in metrics.items() if name.startswith("eval/")} for _, metrics in self.lines
        ]
        steps = [int(each["eval/step"]) for each in found if each]
        assert len(steps) == len(set(steps))
        return {int(each.pop("eval/step")): each for each in found if each}


FIVE = partial(Sums, 100, 5)
"""Of its five answers the policy gets one wrong."""


def evaluation(make_env: Callable[[], Any] = FIVE, **options: Any) -> Evaluation:
    given: dict[str, Any] = {"sets": {"sums": make_env}, "every": 2} | options
    return Evaluation(**given)


def pipeline(
    evaluated: Evaluation | None,
    *,
    make_env: Callable[[], Any] = Sums,
    on: Any = None,
    max_lag: int = 0,
    steps: int = 4,
    tokenizer: Letters = LETTERS,
    **sink: Any,
) -> Pipeline:
    env = SourceEnv(
        make_env,
        Adds(),
        tokenizer,
        group_size=GROUP_SIZE,
        evaluation=evaluated,
    )
    given: dict[str, Any] = {"trainer": Counts(), "max_steps": steps} | sink
    return (
        source(env, on=on or here(), max_lag=max_lag)
        .then(Batcher(max_tokens=10_000, sequences=GROUPS * GROUP_SIZE))
        .sink(SinkTrainer(**given))
    )


async def ran(run: Pipeline, folder: Path | None = None, **options: Any) -> tuple[Lines, dict[str, Any]]:
    """Run; return its metrics and the counts of its ledger."""
    lines, ledger = Lines(), Ledger()
    await run.run(metrics=Metrics(lines), ledger=ledger, folder=folder, **options)
    return lines, msgspec.to_builtins(ledger.balance())
