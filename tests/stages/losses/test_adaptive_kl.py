"""The weight of a KL term that follows the divergence, and survives a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.stages.losses.scoring import random
from tests.tiny_model import TinyModel

from penstock import TrainBatch
from penstock.losses import KL, AdaptiveKL, Loss, PPOClip
from penstock.testing import batch
from penstock.torch import TorchTrainer

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 11


class ControllerOfVerl:
    """verl/trainer/ppo/core_algos.py:159-174 of verl-0.9.1, and skyrl ppo_utils.py:51-60 at a9564572eb8e.

    proportional_error = np.clip(current_kl / target - 1, -0.2, 0.2)
    mult = 1 + proportional_error * n_steps / self.horizon
    self.value *= mult
    """

    def __init__(self, value: float, target: float, horizon: int) -> None:
        self.value, self.target, self.horizon = value, target, horizon

    def update(self, current: float, n_steps: int) -> None:
        error = np.clip(current / self.target - 1, -0.2, 0.2)
        self.value *= 1 + error * n_steps / self.horizon


def made(seed: int) -> TrainBatch:
    numbers = np.random.default_rng(seed)
    packed = batch(groups=2, completion_lengths=[3, 7, 5])
    return msgspec.structs.replace(
        packed,
        tokens=numbers.integers(0, VOCABULARY, len(packed.tokens)).astype(np.int32),
        advantages=numbers.standard_normal(len(packed.tokens)).astype(np.float32),
    )


def trainer(loss: Loss, seed: int = 0, **options: Any) -> TorchTrainer:
    return TorchTrainer(
        TinyModel(vocabulary=VOCABULARY, seed=seed),
        optimizer=torch.optim.AdamW,
        loss=loss,
        reference=TinyModel(vocabulary=VOCABULARY, seed=1),
        **options,
    )


@pytest.mark.parametrize("target", [1e-3, 1.0, 0.02])
def test_the_weight_follows_the_divergence_as_that_of_verl_does(target: float) -> None:
    term, controller = AdaptiveKL(0.1, target, horizon=50), ControllerOfVerl(0.1, target, 50)
    training = trainer(PPOClip() + term, micro_batch_tokens=12)

    for seed in range(4):
        metrics = training.step(made(seed))
        assert metrics["adaptive_kl/weight"] == controller.value
        controller.update(metrics["adaptive_kl/kl"], 6)

    assert term.weight == pytest.approx(controller.value, rel=1e-15)
    assert term.weight != 0.1


def test_its_loss_is_that_of_a_kl_term_with_this_weight() -> None:
    given = random()

    for estimator in ("k1", "k2", "k3"):
        adaptive, fixed = AdaptiveKL(0.3, 1.0, estimator=estimator), 0.3 * KL(estimator)
        torch.testing.assert_close((PPOClip() + adaptive)(given).loss, (PPOClip() + fixed)(given).loss)
        assert adaptive(given).metrics["adaptive_kl/kl"].value() == pytest.approx(KL(estimator)(given).loss.item())


def test_a_resumed_run_goes_on_with_the_weight_bit_for_bit(tmp_path: Path) -> None:
    term = AdaptiveKL(0.1, 0.02, horizon=50)
    whole = trainer((PPOClip() + term).aggregated("seq-mean-token-mean"))
    for seed in range(2):
        whole.step(made(seed))
    checkpoint = whole.save(tmp_path, {})
    expected = [whole.step(made(seed)) for seed in range(2, 5)]

    again = AdaptiveKL(0.1, 0.02, horizon=50)
    resumed = trainer((PPOClip() + again).aggregated("seq-mean-token-mean"), seed=7)
    resumed.resume(checkpoint)
    got = [resumed.step(made(seed)) for seed in range(2, 5)]

    names = ("adaptive_kl/weight", "adaptive_kl/kl", "loss", "grad_norm")
    assert [[step[name] for name in names] for step in got] == [[step[name] for name in names] for step in expected]
    assert again.weight == term.weight
    for name, tensor in whole.weights().items():
        assert torch.equal(tensor, resumed.weights()[name])


def test_a_checkpoint_without_the_weight_is_refused(tmp_path: Path) -> None:
    checkpoint = trainer(PPOClip() + 0.1 * KL()).save(tmp_path, {})

    with pytest.raises(ValueError, match=r"expected a checkpoint with state \['adaptive_kl'\], got \[\]"):
        trainer(PPOClip() + AdaptiveKL(0.1, 1.0)).resume(checkpoint)


def test_several_updates_on_a_batch_are_one_step_of_the_weight() -> None:
    term, controller = AdaptiveKL(0.1, 1e-3, horizon=50), ControllerOfVerl(0.1, 1e-3, 50)
    training = trainer(PPOClip(old="proximal") + term, updates=3)

    controller.update(training.step(made(0))["adaptive_kl/kl"], 6)

    assert term.weight == pytest.approx(controller.value, rel=1e-15)


def test_one_loss_has_one_adaptive_term() -> None:
    with pytest.raises(ValueError, match="loss: expected at most one AdaptiveKL, got 2"):
        trainer(PPOClip() + AdaptiveKL(0.1, 1.0) + AdaptiveKL(0.2, 1.0))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"weight": 0.0, "target": 1.0}, "weight: expected a finite number above 0, got 0.0"),
        ({"weight": 0.1, "target": float("nan")}, "target: expected a finite number above 0, got nan"),
        ({"weight": 0.1, "target": 1.0, "horizon": 0}, "horizon: expected"),
        (
            {"weight": 0.1, "target": 1.0, "estimator": "k4"},
            "estimator: expected one of k1, k2, k3, k1\\+, k3\\+, got 'k4'",
        ),
    ],
    ids=["weight", "target", "horizon", "estimator"],
)
def test_numbers_that_steer_nothing_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaptiveKL(**values)


def test_another_first_weight_replaces_the_adapted_one_in_a_resumed_run(tmp_path: Path) -> None:
    before = trainer(PPOClip() + AdaptiveKL(0.1, 1e-3, horizon=50))
    before.step(made(0))
    checkpoint = before.save(tmp_path, {})
    same, other = (trainer(PPOClip() + AdaptiveKL(weight, 1e-3, horizon=50)) for weight in (0.1, 0.5))

    for resumed in (same, other):
        resumed.resume(checkpoint)

    assert same.step(made(1))["adaptive_kl/weight"] == before.step(made(1))["adaptive_kl/weight"] != 0.1
    assert other.step(made(1))["adaptive_kl/weight"] == 0.5
