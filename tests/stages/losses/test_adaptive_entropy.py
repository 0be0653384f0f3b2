"""The weight of an entropy bonus that holds the entropy at a target, and survives a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.stages.losses.scoring import random
from tests.tiny_model import TinyModel

from penstock import TrainBatch
from penstock.errors import InvalidConfig
from penstock.losses import AdaptiveEntropy, AdaptiveKL, Loss, PPOClip
from penstock.testing import batch
from penstock.torch import TorchTrainer

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 11
NAMES = ("adaptive_entropy/weight", "adaptive_entropy/entropy", "loss", "grad_norm")


class ControllerOfTRL:
    """trl grpo_trainer.py:853, 3206-3209 and 3231-3239 of 1.16.0.

    self._last_world_entropy = float("inf")
    …
    apply_coef = self.entropy_coef if self._last_world_entropy <= self.args.entropy_target else 0.0
    …
    if world_entropy <= self.args.entropy_target:
        self.entropy_coef = min(self.entropy_coef + self.args.entropy_coef_delta, self.args.entropy_coef_max)
    else:
        self.entropy_coef = max(self.entropy_coef - self.args.entropy_coef_delta, self.args.entropy_coef_min)
    self._last_world_entropy = world_entropy
    """

    def __init__(self, value: float, target: float, delta: float, most: float) -> None:
        self.value, self.target, self.delta, self.most, self.last = value, target, delta, most, math.inf

    def applied(self) -> float:
        return self.value if self.last <= self.target else 0.0

    def update(self, entropy: float) -> None:
        if entropy <= self.target:
            self.value = min(self.value + self.delta, self.most)
        else:
            self.value = max(self.value - self.delta, 0.0)
        self.last = entropy


def made(seed: int) -> TrainBatch:
    numbers = np.random.default_rng(seed)
    packed = batch(groups=2, completion_lengths=[3, 7, 5])
    return msgspec.structs.replace(
        packed,
        tokens=numbers.integers(0, VOCABULARY, len(packed.tokens)).astype(np.int32),
        advantages=numbers.standard_normal(len(packed.tokens)).astype(np.float32),
    )


def trainer(loss: Loss, **options: Any) -> TorchTrainer:
    model = TinyModel(vocabulary=VOCABULARY)
    return TorchTrainer(model, optimizer=torch.optim.AdamW, loss=loss, **options)


@pytest.mark.parametrize("target", [0.01, 2.35, 9.0])
@pytest.mark.parametrize("tokens", [None, 12])
def test_the_weight_follows_the_entropy_as_that_of_trl_does(target: float, tokens: int | None) -> None:
    term, controller = AdaptiveEntropy(target, 0.1, 0.04, 0.15), ControllerOfTRL(0.1, target, 0.04, 0.15)
    training = trainer(PPOClip() + term, micro_batch_tokens=tokens)

    for seed in range(5):
        metrics = training.step(made(seed))
        assert metrics["adaptive_entropy/weight"] == controller.applied()
        assert metrics["adaptive_entropy/entropy"] == pytest.approx(metrics["entropy"])
        controller.update(metrics["adaptive_entropy/entropy"])

    assert term.weight == controller.value


def test_its_loss_is_that_of_a_bonus_with_this_weight() -> None:
    given, term = random(), AdaptiveEntropy(9.0, 0.3, 0.1)
    assert (PPOClip() + term)(given).loss == PPOClip()(given).loss

    term.adapt({"adaptive_entropy/entropy": 1.0}, 5)

    torch.testing.assert_close((PPOClip() + term)(given).loss, PPOClip()(given).loss - 0.4 * given.entropy.mean())


def test_micro_batches_change_neither_weights_nor_metrics() -> None:
    whole, parts = (trainer(PPOClip() + AdaptiveEntropy(9.0, 0.2), micro_batch_tokens=n) for n in (None, 12))

    for seed in range(3):
        one, other = whole.step(made(seed)), parts.step(made(seed))
        assert [other[name] for name in NAMES] == pytest.approx([one[name] for name in NAMES], abs=1e-5)


def test_a_resumed_run_goes_on_with_the_weight_bit_for_bit(tmp_path: Path) -> None:
    loss = (PPOClip() + AdaptiveEntropy(9.0, 0.1) + AdaptiveKL(0.1, 0.02)).aggregated("seq-mean-token-mean")
    reference = TinyModel(vocabulary=VOCABULARY, seed=1)
    whole = trainer(loss, reference=reference)
    whole.step(made(0))
    checkpoint = whole.save(tmp_path, {})
    expected = [whole.step(made(seed)) for seed in range(1, 4)]

    again = (PPOClip() + AdaptiveEntropy(9.0, 0.1) + AdaptiveKL(0.1, 0.02)).aggregated("seq-mean-token-mean")
    resumed = trainer(again, reference=reference)
    resumed.resume(checkpoint)
    got = [resumed.step(made(seed)) for seed in range(1, 4)]

    assert [[step[name] for name in NAMES] for step in got] == [[step[name] for name in NAMES] for step in expected]


def test_another_first_weight_replaces_the_adapted_one_in_a_resumed_run() -> None:
    before, other = AdaptiveEntropy(9.0, 0.1), AdaptiveEntropy(9.0, 0.5)
    before.adapt({"adaptive_entropy/entropy": 1.0}, 5)

    other.load_state_dict(before.state_dict())

    assert other.weight == 0.5


def test_one_loss_has_one_adaptive_term_of_a_class() -> None:
    with pytest.raises(InvalidConfig, match="loss: expected at most one AdaptiveEntropy, got 2"):
        trainer(PPOClip() + AdaptiveEntropy(1.0) + AdaptiveEntropy(2.0))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"target": 0.0}, "target: expected a finite number above 0, got 0.0"),
        ({"target": 1.0, "delta": math.nan}, "delta: expected a finite number above 0, got nan"),
        ({"target": 1.0, "weight": -0.1}, "weight: expected a finite number of 0 or more, got -0.1"),
        ({"target": 1.0, "weight": 2.0}, "weight: expected at most 1.0, the largest weight, got 2.0"),
    ],
)
def test_numbers_that_steer_nothing_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        AdaptiveEntropy(**values)
