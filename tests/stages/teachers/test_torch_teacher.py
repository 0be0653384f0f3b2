from __future__ import annotations

from functools import partial

import anyio
import numpy as np
import pytest
import torch
from tests.stages.training.test_distilled_training import VOCABULARY, expected_by
from tests.tiny_model import TinyModel
from torch import Tensor

from arithmetic.tokenizer import TOKENIZER
from penstock import Teacher, TrainBatch, TrajectoryGroup, Worker
from penstock.errors import InvalidRecord
from penstock.losses import Distillation
from penstock.testing import drive, group
from penstock.torch import Attention, KVCache, TorchTeacher, TorchTrainer

pytestmark = pytest.mark.usefixtures("one_thread")


def made(instance_id: str, lengths: list[int]) -> TrajectoryGroup:
    count = sum(lengths) + 2 * len(lengths)
    tokens = np.random.default_rng(int(instance_id)).integers(0, VOCABULARY, count)
    return group(instance_id=instance_id, completion_lengths=lengths, tokens=tokens)


@pytest.mark.parametrize(("top_k", "micro_batch_tokens"), [(3, 16_384), (3, 16), (1, 1), (50, 16_384)])
async def test_candidates_are_those_of_every_sequence_scored_alone(top_k: int, micro_batch_tokens: int) -> None:
    """The candidates of a token are the likeliest tokens after the tokens before it, and the token itself."""
    groups = [made("0", [9, 2, 3]), made("1", [1, 5])]
    recipe = TorchTeacher(partial(TinyModel, seed=1), TOKENIZER, micro_batch_tokens)

    out = await drive(Teacher(recipe, top_k=top_k), groups)

    batch = TrainBatch.pack(sorted(out, key=lambda each: each.instance_id))
    expected = expected_by(TinyModel(seed=1), batch)
    assert batch.teacher_ids is not None
    assert batch.teacher_logprobs is not None
    for token, ids, logprobs, trains, among in zip(
        batch.tokens, batch.teacher_ids, batch.teacher_logprobs, batch.loss_mask, expected, strict=True
    ):
        wanted = {*np.argsort(among)[-top_k:].tolist(), int(token)} if trains else set()
        assert set(ids.tolist()) - {-1} == wanted
        np.testing.assert_allclose(logprobs[ids >= 0], among[ids[ids >= 0]], atol=1e-5)


def step(batch: TrainBatch, loss: Distillation = Distillation()) -> dict[str, float]:  # noqa: B008 (a frozen value)
    return TorchTrainer(TinyModel(), optimizer=torch.optim.AdamW, loss=loss).step(batch)


async def test_a_teacher_s_one_likeliest_token_renormalised_is_refused_with_the_reason() -> None:
    """Its columns are two wide, and a token that is not the likeliest has two candidates: the loss would not be 0."""
    recipe = TorchTeacher(partial(TinyModel, seed=1), TOKENIZER)
    out = {top_k: await drive(Teacher(recipe, top_k=top_k), [made("0", [9, 2, 3])]) for top_k in (1, 2)}

    with pytest.raises(InvalidRecord, match=r"divergence is always 0.* or a higher top_k"):
        await anyio.to_thread.run_sync(step, TrainBatch.pack(out[1]), Distillation(mode="renormalised"))

    for top_k, loss in ((1, Distillation(mode="tail")), (2, Distillation(mode="renormalised"))):
        metrics = await anyio.to_thread.run_sync(step, TrainBatch.pack(out[top_k]), loss)
        assert metrics["loss"] > 0


async def test_a_teacher_of_the_same_weights_has_nothing_to_teach() -> None:
    recipe = TorchTeacher(TinyModel, TOKENIZER)

    out = await drive(Teacher(recipe, top_k=4), [made("0", [9, 2, 3])])

    metrics = await anyio.to_thread.run_sync(step, TrainBatch.pack(out))
    assert metrics["loss"] == pytest.approx(0, abs=1e-6)
    assert metrics["distill/tokens_used"] == 14


class Counted(TinyModel):
    """Notes how many sequences each call is given."""

    calls: list[int]

    def forward(self, tokens: Tensor, *, positions: Tensor, attend: Attention, cache: KVCache | None = None) -> Tensor:
        self.calls.append(int((positions == 0).sum()))
        return super().forward(tokens, positions=positions, attend=attend, cache=cache)


async def test_requests_of_one_moment_are_scored_together() -> None:
    model = Counted()
    model.calls = []
    async with TorchTeacher(lambda: model, TOKENIZER).open(Worker()) as engine, anyio.create_task_group() as tasks:
        for length in (3, 4, 5):
            tasks.start_soon(engine.candidates, np.arange(length, dtype=np.int32), np.arange(length) > 0, 2)

    assert len(model.calls) == 1
    assert model.calls[0] >= 3


async def test_an_error_of_the_model_is_raised_by_its_requests_and_by_no_later_ones() -> None:
    async with TorchTeacher(TinyModel, TOKENIZER).open(Worker()) as engine:
        with pytest.raises(IndexError):
            await engine.candidates(np.array([1, 99], np.int32), np.array([False, True]), 2)

        found = await engine.candidates(np.array([1, 2], np.int32), np.array([False, True]), 2)

    assert found.counts.tolist() in ([0, 2], [0, 3])


async def test_a_cancelled_request_affects_no_other() -> None:
    question = (np.array([1, 2], np.int32), np.array([False, True]), 2)
    async with TorchTeacher(TinyModel, TOKENIZER).open(Worker()) as engine, anyio.create_task_group() as tasks:
        with anyio.move_on_after(0):
            tasks.start_soon(engine.candidates, *question)
            await engine.candidates(*question)

        found = await engine.candidates(*question)

        assert found.counts[0] == 0
        assert found.counts[1] >= 2
