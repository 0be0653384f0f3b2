"""The teacher-distillation environment of Atropos: its teacher's arrays reach the distillation loss, and it uses them.

The teacher came to Atropos after atroposlib 0.4.0 was released, so its modules are taken from the checkout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, cast

import pytest
import torch
from tests.atropos_real.processes import ROOT, serve
from tests.atropos_real.trained import STEPS, gateway_for, train_on
from torch import Tensor

from penstock import TrainBatch
from penstock.losses import Distillation
from penstock.torch import Attention, TorchTrainer

pytestmark = pytest.mark.timeout(600)

TOP_K = 4
VOCABULARY = 300

TeacherCandidates: TypeAlias = list[dict[int, float]]
"""Of each token of a sequence, what the teacher expected there."""


class Bigrams(torch.nn.Module):
    """Logits that depend on the token before alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, tokens: Tensor, *, positions: Tensor, attend: Attention, cache: None = None) -> Tensor:  # noqa: ARG002
        logits: Tensor = self.table(tokens)
        return logits


@dataclass
class Student:
    """A TorchTrainer, and what it was given and said."""

    trainer: TorchTrainer = field(
        default_factory=lambda: TorchTrainer(cast("Any", Bigrams()), optimizer=torch.optim.SGD, loss=Distillation())
    )
    taught: dict[bytes, TeacherCandidates] = field(default_factory=dict)
    trained_tokens: list[int] = field(default_factory=list)
    metrics: list[Mapping[str, float]] = field(default_factory=list)

    def step(self, batch: TrainBatch) -> Mapping[str, float]:
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


async def test_every_candidate_of_the_teacher_reaches_the_loss(
    checkout: Path, workspace: Path, model: str, tmp_path: Path, student: Student
) -> None:
    script = ROOT / "examples/atropos/teacher_distillation.py"
    tokenizer = str(workspace / "tokenizer")
    teacher = {"base_url": f"{model}/v1", "model_name": tokenizer, "tokenizer_name": tokenizer, "api_key": "none"}
    options = [part for name, value in teacher.items() for part in (f"--teacher.{name}", value)]
    options += ["--env.max_token_length", "8192", "--env.teacher_top_k", str(TOP_K)]

    environment = await train_on(
        gateway_for(candidates=TOP_K + 1),
        student,
        lambda url: serve(script, url, model, workspace, *options, folder=tmp_path, path=checkout),
    )

    sent = sent_candidates(environment.sent())
    assert student.taught
    assert student.taught == {tokens: sent[tokens] for tokens in student.taught}
    assert [metrics["distill/tokens_used"] for metrics in student.metrics] == student.trained_tokens
    assert len(student.metrics) == STEPS
