"""Distillation through the trainer: what the columns of a batch become, and what of it is an error."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.tiny_model import TinyModel

from penstock import TrainBatch
from penstock.errors import InvalidRecord
from penstock.losses import AdvantageWeighted, Distillation, PPOClip, SampledDistillation, Term
from penstock.testing import batch
from penstock.torch import Attention, TorchTrainer

VOCABULARY = 11
SGD = partial(torch.optim.SGD, lr=1.0)


pytestmark = pytest.mark.usefixtures("one_thread")


@torch.no_grad()
def expected_by(model: TinyModel, packed: TrainBatch) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return [N, V] the predictions of `model` for every token but the first ones, each sequence by itself."""
    rows: list[torch.Tensor] = []
    for first, last in zip(packed.cu_seqlens, packed.cu_seqlens[1:], strict=False):
        tokens = torch.tensor(packed.tokens[first:last]).long()[None]
        length = tokens.shape[1]
        attend = Attention.packed(torch.zeros(1, length, dtype=torch.int64))
        logits = model(tokens, positions=torch.arange(length)[None], attend=attend)[0]
        rows += [torch.zeros(1, VOCABULARY), torch.log_softmax(logits[:-1], -1)]
    return torch.cat(rows).numpy()


def taught(teacher: TinyModel, top_k: int = 3, **columns: Any) -> TrainBatch:
    """Return two groups of sequences of different lengths, with the teacher's likeliest tokens at all but the first."""
    packed = batch(groups=2, completion_lengths=[3, 7, 5])
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, len(packed.tokens)).astype(np.int32)
    packed = msgspec.structs.replace(packed, tokens=tokens)
    expected = expected_by(teacher, packed)
    ids = np.argsort(expected, axis=1)[:, -top_k:].astype(np.int32)
    logprobs = np.take_along_axis(expected, ids, axis=1)
    ids[packed.cu_seqlens[:-1]] = -1
    return msgspec.structs.replace(packed, teacher_ids=ids, teacher_logprobs=logprobs, **columns)


def trainer(model: TinyModel, loss: Term | Any, **options: Any) -> TorchTrainer:
    return TorchTrainer(model, optimizer=SGD, loss=loss, **options)


@pytest.mark.parametrize("micro_batch_tokens", [None, 24, 1])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_policy_that_is_its_own_teacher_has_nothing_to_learn(
    micro_batch_tokens: int | None, temperature: float
) -> None:
    """Were a teacher's word for a token held against the logits of the next one, there would be plenty."""
    student = trainer(TinyModel(), Distillation(), micro_batch_tokens=micro_batch_tokens, temperature=temperature)

    metrics = student.step(taught(TinyModel()))

    assert metrics["loss"] == pytest.approx(0, abs=1e-6)
    assert metrics["grad_norm"] < 1e-5
    assert metrics["distill/tokens_used"] == 30


@pytest.mark.parametrize("loss", [Distillation(), Distillation("jsd", beta=0.5)], ids=repr)
def test_distillation_needs_no_advantages_and_brings_the_policy_to_its_teacher(loss: Term) -> None:
    student, packed = trainer(TinyModel(), loss, max_grad_norm=None), taught(TinyModel(seed=1), top_k=VOCABULARY)
    assert packed.advantages is None

    losses = [student.step(packed)["loss"] for _ in range(12)]

    assert losses[-1] < losses[0] / 2


def test_split_into_micro_batches_a_step_is_the_same() -> None:
    packed = taught(TinyModel(seed=1), advantages=np.linspace(-1, 1, 42, dtype=np.float32))
    loss = PPOClip() + 0.5 * Distillation("reverse_kl")

    one, other = (trainer(TinyModel(), loss, micro_batch_tokens=tokens) for tokens in (None, 16))
    metrics, split = one.step(packed), other.step(packed)

    assert metrics["distill/tokens_used"] == split["distill/tokens_used"] == 30
    assert metrics["loss/distillation"] == pytest.approx(split["loss/distillation"])
    for tensor, same in zip(one.weights().values(), other.weights().values(), strict=True):
        torch.testing.assert_close(tensor, same, atol=1e-6, rtol=0)


def test_candidates_that_no_loss_uses_are_reported_unused() -> None:
    packed = taught(TinyModel(seed=1), advantages=np.ones(42, np.float32))

    metrics = trainer(TinyModel(), AdvantageWeighted()).step(packed)

    assert metrics["distill/tokens_used"] == 0


@pytest.mark.parametrize("loss", [Distillation(), SampledDistillation(), PPOClip() + Distillation()], ids=repr)
def test_a_batch_of_which_no_token_can_be_used_is_an_error_and_trains_nothing(loss: Any) -> None:
    packed = taught(TinyModel(seed=1), advantages=np.ones(42, np.float32))
    packed = msgspec.structs.replace(packed, teacher_ids=np.full_like(packed.teacher_ids, -1))
    student = trainer(TinyModel(), loss)

    with pytest.raises(InvalidRecord, match="distill/tokens_used: expected some of the tokens that train, got none"):
        student.step(packed)

    for tensor, before in zip(student.weights().values(), TinyModel().state_dict().values(), strict=True):
        assert tensor.equal(before)


def test_a_batch_whose_teacher_was_forgotten_is_an_error() -> None:
    with pytest.raises(InvalidRecord, match="teacher_ids: expected a column, got none"):
        trainer(TinyModel(), Distillation()).step(batch(completion_lengths=[2], tokens=[1, 2, 3, 4]))
