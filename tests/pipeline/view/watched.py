"""Small runs that the tests of views watch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import anyio
from tests.pipeline.flow_stages import DropOdd, Groups, Pack

from penstock import Pipeline, SendChannel, SinkTrainer, TrainBatch, source
from penstock.trackers import Samples

STEPS = 4

MEMORY_HERE = re.compile(r"\d (MiB|GiB) here")
"""The memory of the process that runs the tests: it depends on the tests that ran in it before."""


class Words:
    """A tokenizer that decodes everything to the same text."""

    eos_id = 0

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return f"{len(ids)}\ntokens \x1b[2J [bold]"


class Trainer:
    """Returns metrics; prints, or fails, at step 3 if it is told to."""

    def __init__(self, at_step_3: Literal["", "print", "fail"] = "") -> None:
        self.steps = 0
        self._at_step_3 = at_step_3

    def step(self, _: TrainBatch) -> Mapping[str, float]:
        self.steps += 1
        if self.steps == 3 and self._at_step_3 == "print":
            print("printed [by the trainer]")  # noqa: T201 (as a user does)
        if self.steps == 3 and self._at_step_3 == "fail":
            raise ValueError("no such token")
        return {"loss": 1 / self.steps, "accuracy": 0.875}


@dataclass(frozen=True)
class Silent:
    """Sends nothing."""

    async def run(self, outbox: SendChannel[int]) -> None:  # noqa: ARG002 (the protocol's)
        await anyio.sleep_forever()


def small_run(at_step_3: Literal["", "print", "fail"] = "") -> Pipeline:
    """Return a pipeline that ends after `STEPS` steps, with groups left over."""
    trainer = Trainer(at_step_3)
    return (
        source(Groups(8 * STEPS, tokenizer=Words()))
        .then(DropOdd())
        .then(Pack())
        .sink(SinkTrainer(trainer, max_steps=STEPS, samples=Samples(every=STEPS)))
    )
