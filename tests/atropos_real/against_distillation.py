"""The teacher-distillation environment of Atropos: its teacher's arrays reach the loss, and the student comes to agree.

The teacher came to Atropos after atroposlib 0.4.0 was released, so its modules are taken from the checkout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import pytest
import torch
from tests.atropos_real.processes import ROOT, Environment, serve
from tests.atropos_real.scripted_model import VOCABULARY, teacher_logprobs
from tests.atropos_real.trained import STEPS, gateway_for, train_on
from torch import Tensor

from penstock import TrainBatch
from penstock.losses import Distillation
from penstock.torch import Attention, TorchTrainer

pytestmark = pytest.mark.timeout(600)

TOP_K = 4

LONG_RUN = 8
"""Steps in which the student learns the bigrams that answers consist of."""

TeacherCandidates: TypeAlias = list[dict[int, float]]
"""Of each token of a sequence, what the teacher expected there."""


class Bigrams(torch.nn.Module):
    """Logits that depend on the token before alone."""

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(vocabulary, vocabulary)

    def forward(self, tokens: Tensor, *, positions: Tensor, attend: Attention, cache: None = None) -> Tensor:  # noqa: ARG002
        logits: Tensor = self.table(tokens)
        return logits


@dataclass
class Student:
    """A TorchTrainer, and what it was given and said."""

    loss: Any = field(default_factory=Distillation)
    model: Bigrams = field(default_factory=Bigrams)
    trainer: TorchTrainer = field(init=False)
    taught: dict[bytes, TeacherCandidates] = field(default_factory=dict)
    trained_tokens: list[int] = field(default_factory=list)
    metrics: list[Mapping[str, float]] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)
    """Before each step, over the whole vocabulary."""

    def __post_init__(self) -> None:
        optimizer = partial(torch.optim.Adam, lr=1.0)
        self.trainer = TorchTrainer(cast("Any", self.model), optimizer=optimizer, loss=self.loss)

    def step(self, batch: TrainBatch) -> Mapping[str, float]:
        self.divergences.append(self.divergence(batch))
        assert batch.teacher_ids is not None
        assert batch.teacher_logprobs is not None
        for begin, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
            rows = zip(batch.teacher_ids[begin:end], batch.teacher_logprobs[begin:end], strict=True)
            self.taught[batch.tokens[begin:end].tobytes()] = [
                {int(token): float(logprob) for token, logprob in zip(*row, strict=True) if token >= 0} for row in rows
            ]
        self.trained_tokens.append(int(batch.loss_mask.sum()))
        self.metrics.append(self.trainer.step(batch))
        return self.metrics[-1]

    def divergence(self, batch: TrainBatch) -> float:
        """Return the mean KL(teacher ‖ student) of the tokens that train, by the whole distributions of both."""
        trained = np.flatnonzero(batch.loss_mask)
        teacher = torch.from_numpy(np.stack([teacher_logprobs(int(batch.tokens[place - 1])) for place in trained]))
        with torch.no_grad():
            logits = self.model.table(torch.from_numpy(batch.tokens[trained - 1].astype(np.int64)))
        student = logits.double().log_softmax(-1)
        return float((teacher.exp() * (teacher - student)).sum(-1).mean())


def sent_candidates(groups: list[dict[str, Any]]) -> dict[bytes, TeacherCandidates]:
    """Return what the environment went to send, in the form of `Student.taught`."""
    return {
        torch.tensor(tokens, dtype=torch.int32).numpy().tobytes(): [
            dict(zip(*row, strict=True)) for row in zip(ids, logprobs, strict=True)
        ]
        for group in groups
        for tokens, ids, logprobs in zip(
            group["tokens"], group["distill_token_ids"], group["distill_logprobs"], strict=True
        )
    }


@pytest.fixture
def student() -> Student:
    """Make the student outside of the event loop: the first optimizer of torch imports modules, which blocks."""
    return Student()


async def taught(
    student: Any, checkout: Path, workspace: Path, model: str, folder: Path, *, top_k: int, steps: int = STEPS
) -> Environment:
    """Train a student on what the environment sends with the candidates of its teacher; return the environment."""
    script = ROOT / "examples/atropos/teacher_distillation.py"
    tokenizer = str(workspace / "tokenizer")
    teacher = {"base_url": f"{model}/v1", "model_name": tokenizer, "tokenizer_name": tokenizer, "api_key": "none"}
    options = [part for name, value in teacher.items() for part in (f"--teacher.{name}", value)]
    options += ["--env.max_token_length", "8192", "--env.teacher_top_k", str(top_k)]
    return await train_on(
        gateway_for(steps, candidates=top_k + 1),
        student,
        lambda url: serve(script, url, model, workspace, *options, folder=folder, path=checkout),
        steps,
    )


async def test_every_candidate_of_the_teacher_reaches_the_loss(
    checkout: Path, workspace: Path, model: str, tmp_path: Path, student: Student
) -> None:
    environment = await taught(student, checkout, workspace, model, tmp_path, top_k=TOP_K)

    sent = sent_candidates(environment.sent())
    assert student.taught
    assert student.taught == {tokens: sent[tokens] for tokens in student.taught}
    assert [metrics["distill/tokens_used"] for metrics in student.metrics] == student.trained_tokens
    assert len(student.metrics) == STEPS


async def test_the_divergence_from_the_teacher_falls(
    checkout: Path, workspace: Path, model: str, tmp_path: Path, student: Student
) -> None:
    await taught(student, checkout, workspace, model, tmp_path, top_k=32, steps=LONG_RUN)

    first, last = student.divergences[0], student.divergences[-1]
    assert first > 2
    assert last < first / 2, student.divergences
    assert len(student.divergences) == LONG_RUN
