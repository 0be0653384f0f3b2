"""Tokens are chosen among those of the whole batch, whatever its micro-batches, once for each update."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.tiny_model import TinyModel
from torch import Tensor

from penstock import TrainBatch
from penstock.losses import KL, ClipCov, KLCov, Loss, PPOClip, TopEntropyMask
from penstock.testing import batch
from penstock.torch import TorchTrainer

VOCABULARY = 11
SGD = partial(torch.optim.SGD, lr=1.0)

pytestmark = pytest.mark.usefixtures("one_thread")

LOSSES: list[Loss] = [
    ClipCov(share=0.2, least=0.0),
    KLCov(share=0.2),
    PPOClip() * TopEntropyMask(0.3),
    (ClipCov(share=0.1, least=-1.0) * TopEntropyMask(0.5) + KLCov(share=0.3)).aggregated("seq-mean-token-mean"),
]


def made(seed: int = 0, lengths: tuple[int, ...] = (3, 17, 5, 8)) -> TrainBatch:
    numbers = np.random.default_rng(seed)
    packed = batch(groups=2, completion_lengths=list(lengths))
    count = len(packed.tokens)
    return msgspec.structs.replace(
        packed,
        tokens=numbers.integers(0, VOCABULARY, count).astype(np.int32),
        advantages=numbers.standard_normal(count).astype(np.float32),
        behavior_logprobs=np.where(packed.loss_mask, numbers.normal(-2.4, 0.3, count), 0).astype(np.float32),
    )


def trainer(loss: Loss, micro_batch_tokens: int | None = None, **options: Any) -> TorchTrainer:
    given: dict[str, Any] = {"optimizer": SGD, "max_grad_norm": None} | options
    return TorchTrainer(TinyModel(vocabulary=VOCABULARY), loss=loss, micro_batch_tokens=micro_batch_tokens, **given)


def untimed(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(("timing_s/", "weights/"))}


def same(one: TorchTrainer, other: TorchTrainer, atol: float = 1e-6) -> None:
    weights: dict[str, Tensor] = dict(other.weights())
    for name, tensor in one.weights().items():
        torch.testing.assert_close(tensor, weights[name], atol=atol, rtol=0)


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
@pytest.mark.parametrize("tokens", [1, 24, 48])
def test_micro_batches_change_neither_gradient_nor_metrics(loss: Loss, tokens: int) -> None:
    whole, parts = trainer(loss, updates=2), trainer(loss, tokens, updates=2)

    for seed in range(3):
        assert untimed(parts.step(made(seed))) == pytest.approx(untimed(whole.step(made(seed))), abs=1e-5)
    same(parts, whole, atol=1e-5)


def test_a_resumed_run_chooses_the_same_tokens(tmp_path: Path) -> None:
    loss = ClipCov(share=0.05, least=-99.0, most=99.0)
    first, resumed = trainer(loss), trainer(loss)
    first.step(made(0))
    resumed.resume(first.save(tmp_path, {}))

    assert untimed(resumed.step(made(1))) == untimed(first.step(made(1)))
    same(resumed, first, atol=0)


def test_another_update_chooses_other_tokens() -> None:
    """All tokens have the same covariance of 0, and one of 66 is chosen at random."""
    packed = msgspec.structs.replace(made(), advantages=np.where(made().loss_mask, 1, 0).astype(np.float32))
    loss, still = ClipCov(share=0.01, least=-1.0), partial(torch.optim.SGD, lr=1e-30)
    training = trainer(loss, optimizer=still)

    losses = {round(training.step(packed)["loss"], 5) for _ in range(8)}

    assert len(losses) > 1


def test_a_choice_leaves_the_proximal_policy_that_of_before_the_first_update() -> None:
    with_choice = PPOClip(old="proximal") + 0.0 * KLCov()
    plain, choosing = trainer(PPOClip(old="proximal"), updates=3), trainer(with_choice, 24, updates=3)

    plain.step(made())
    choosing.step(made())

    same(choosing, plain, atol=1e-5)


def test_a_reference_is_scored_beside_a_choice() -> None:
    reference = TinyModel(vocabulary=VOCABULARY, seed=9)
    training = trainer(KLCov(share=0.2) + 0.1 * KL(), 24, reference=reference)

    assert training.step(made())["ref_kl"] > 0
