"""Measure the share of held-out problems that the policy solves with greedy decoding.

There are two exams with different problems. The quiz is taken during training and decides when it stops. The final exam
is taken before and after training and decides nothing, so its result is not biased by the stopping rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from penstock import TrainBatch
from penstock._stages.engines.torch_rows import SampledRow, SamplingRequest
from penstock._stages.engines.torch_sampling import SamplingBatch
from penstock.policies import SamplingParams
from penstock.torch import TorchTrainer

from .model import Transformer
from .task import HELD_OUT, LONGEST_ANSWER, held_out, is_right
from .tokenizer import TOKENIZER

__all__ = ["ExaminedTrainer", "final_exam", "quiz"]


def quiz(model: Transformer) -> float:
    """Return the share of the first half of the held-out problems that `model` solves, 0 to 1."""
    return _share_right(model, held_out()[: HELD_OUT // 2])


def final_exam(model: Transformer) -> float:
    """Return the share of the second half of the held-out problems that `model` solves, 0 to 1."""
    return _share_right(model, held_out()[HELD_OUT // 2 :])


def _share_right(model: Transformer, problems: Sequence[dict[str, Any]]) -> float:
    prompts = [np.array(TOKENIZER.encode(entry["question"]), np.int32) for entry in problems]
    sampling = SamplingParams(max_completion_tokens=LONGEST_ANSWER, greedy=True)
    rows = [SampledRow(SamplingRequest(prompt, sampling)) for prompt in prompts]
    batch = SamplingBatch(model, end_ids=frozenset({TOKENIZER.eos_id}), device=torch.device("cpu"))
    batch.join(batch.read(rows, version=0))
    while batch.live:
        batch.step(version=0)
    completions = [TOKENIZER.decode(row.tokens[: len(row.tokens) - row.ended]) for row in rows]
    return sum(is_right(completion, entry) for completion, entry in zip(completions, problems, strict=True)) / len(
        problems
    )


class ExaminedTrainer:
    """A trainer that measures the policy after every so many steps, and adds `accuracy` to the metrics of the step."""

    def __init__(self, trainer: TorchTrainer, model: Transformer, *, every: int = 10) -> None:
        self._trainer = trainer
        self._model = model
        self._every = every
        self.weights = trainer.weights

    def step(self, batch: TrainBatch) -> Mapping[str, float]:
        """Train on `batch`; see `Trainer`."""
        metrics = self._trainer.step(batch)
        if self._trainer.steps % self._every == 0:
            metrics["accuracy"] = quiz(self._model)
        return metrics
