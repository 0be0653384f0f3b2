"""The learning rate follows its schedule, only matrices decay, and a reference may follow the policy."""

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
from penstock.errors import InvalidConfig, WeightsMismatch
from penstock.losses import KL, AdvantageWeighted
from penstock.testing import batch
from penstock.torch import ReferenceUpdates, TorchTrainer, adamw

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 11

HALVING = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)


def made(seed: int = 0) -> TrainBatch:
    packed = batch(groups=2, completion_lengths=[3, 5])
    numbers = np.random.default_rng(seed)
    advantages = numbers.standard_normal(len(packed.tokens)).astype(np.float32)
    tokens = numbers.integers(0, VOCABULARY, len(packed.tokens)).astype(np.int32)
    return msgspec.structs.replace(packed, tokens=tokens, advantages=advantages)


def trainer(**options: Any) -> TorchTrainer:
    given: dict[str, Any] = {"optimizer": partial(adamw, lr=0.1), "loss": AdvantageWeighted()} | options
    return TorchTrainer(TinyModel(vocabulary=VOCABULARY), **given)


def clone(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


# -- schedules ---------------------------------------------------------------------------------------------------------


def test_each_step_uses_the_next_learning_rate_of_the_schedule() -> None:
    scheduled = trainer(schedule=HALVING)

    rates = [scheduled.step(made(step))["lr"] for step in range(3)]

    assert rates == pytest.approx([0.1, 0.05, 0.025])


def test_several_updates_on_a_batch_are_one_step_of_the_schedule() -> None:
    scheduled = trainer(schedule=HALVING, updates=3)

    assert [scheduled.step(made())["lr"], scheduled.step(made())["lr"]] == pytest.approx([0.1, 0.05])


def test_a_resumed_schedule_goes_on_where_it_was(tmp_path: Path) -> None:
    whole, resumed = trainer(schedule=HALVING), trainer(schedule=HALVING)
    whole.step(made())
    checkpoint = whole.save(tmp_path, {})
    expected = whole.step(made())["lr"]

    resumed.resume(checkpoint)

    assert resumed.step(made())["lr"] == expected == pytest.approx(0.05)


def resumed_beside(checkpoint: Path, **options: Any) -> TorchTrainer:
    resumed = trainer(**options)
    resumed.resume(checkpoint)
    return resumed


@pytest.mark.parametrize(
    "schedule",
    [
        None,
        HALVING,
        partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
        partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=9),
        partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=20),
    ],
    ids=["constant", "exponential", "lambda", "cosine", "one cycle"],
)
def test_the_rates_of_a_resumed_run_are_bit_for_bit_those_of_a_whole_one(tmp_path: Path, schedule: Any) -> None:
    whole = trainer(schedule=schedule)
    for step in range(3):
        whole.step(made(step))
    checkpoint = whole.save(tmp_path, {})

    resumed = resumed_beside(checkpoint, schedule=schedule)

    for step in range(3, 6):
        assert resumed.step(made(step))["lr"] == whole.step(made(step))["lr"]
    assert all(torch.equal(tensor, resumed.weights()[name]) for name, tensor in whole.weights().items())


@pytest.mark.parametrize(
    ("changed", "rate"),
    [
        ({"optimizer": partial(adamw, lr=0.4)}, 0.1),
        ({"schedule": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.25)}, 0.1 / 16),
        ({"schedule": None}, 0.1),
        ({"optimizer": partial(adamw, lr=0.4), "schedule": None}, 0.4),
    ],
    ids=["rate", "schedule", "no schedule", "both"],
)
def test_a_resumed_run_has_the_rate_that_its_own_recipes_give_at_that_step(
    tmp_path: Path, changed: dict[str, Any], rate: float
) -> None:
    before = trainer(schedule=HALVING)
    before.step(made(0))
    before.step(made(1))

    resumed = resumed_beside(before.save(tmp_path, {}), **{"schedule": HALVING} | changed)

    assert resumed.step(made(2))["lr"] == pytest.approx(rate)


def test_changed_hyper_parameters_apply_from_the_first_step_of_a_resumed_run_on(tmp_path: Path) -> None:
    before = trainer()
    before.step(made(0))
    checkpoint = before.save(tmp_path, {})
    resumed = resumed_beside(checkpoint, optimizer=partial(adamw, lr=0.02, betas=(0.5, 0.7), weight_decay=0.3))
    metrics = resumed.step(made(1))

    matrices, vectors = groups_of(resumed.save(tmp_path, {}))
    assert (metrics["lr"], matrices["lr"], matrices["betas"], matrices["weight_decay"]) == (0.02, 0.02, (0.5, 0.7), 0.3)
    assert vectors["weight_decay"] == 0
    unchanged = resumed_beside(checkpoint)
    unchanged.step(made(1))
    assert not all(torch.equal(tensor, unchanged.weights()[name]) for name, tensor in resumed.weights().items())


def groups_of(checkpoint: Path) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = torch.load(checkpoint / "optimizer.pt", weights_only=True)["optimizer"][
        "param_groups"
    ]
    return groups


class Counting(torch.optim.SGD):
    """Has state in its parameter groups, as optimizers that find their own rate do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        for group in self.param_groups:
            group["counted"] = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["counted"] += 1
        return super().step(closure)


def test_state_that_an_optimizer_has_in_its_groups_is_restored_beside_a_changed_rate(tmp_path: Path) -> None:
    before = trainer(optimizer=partial(Counting, lr=0.1))
    before.step(made(0))
    before.step(made(1))

    resumed = resumed_beside(before.save(tmp_path, {}), optimizer=partial(Counting, lr=0.2))
    resumed.step(made(2))

    (group,) = groups_of(resumed.save(tmp_path, {}))
    assert (group["counted"], group["lr"]) == (3, 0.2)


# -- weight decay ------------------------------------------------------------------------------------------------------


def test_matrices_decay_and_vectors_do_not() -> None:
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    optimizer = adamw([matrix, vector], lr=0.1, weight_decay=0.5)

    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()

    assert torch.allclose(matrix, torch.full((2, 2), 0.95))
    assert torch.equal(vector, torch.ones(2))


# -- a reference that changes ------------------------------------------------------------------------------------------


def test_a_reference_is_equal_to_the_policy_after_every_so_many_steps() -> None:
    reference = TinyModel(vocabulary=VOCABULARY, seed=3)
    before = clone(reference.state_dict())
    synced = trainer(reference=reference, reference_updates=ReferenceUpdates(every=2))

    synced.step(made())
    assert all(torch.equal(tensor, before[name]) for name, tensor in reference.state_dict().items())
    synced.step(made())
    assert all(torch.equal(tensor, synced.weights()[name]) for name, tensor in reference.state_dict().items())


def test_an_averaged_reference_moves_by_its_share() -> None:
    reference = TinyModel(vocabulary=VOCABULARY, seed=3)
    before = clone(reference.state_dict())
    averaged = trainer(reference=reference, reference_updates=ReferenceUpdates(share=0.25))

    averaged.step(made())

    for name, policy in averaged.weights().items():
        assert torch.allclose(reference.state_dict()[name], 0.75 * before[name] + 0.25 * policy, atol=1e-6)


def test_a_run_with_an_updated_reference_resumes_bit_for_bit(tmp_path: Path) -> None:
    def fresh() -> TorchTrainer:
        updates = ReferenceUpdates(share=0.5)
        return trainer(
            loss=AdvantageWeighted() + 0.1 * KL(),
            reference=TinyModel(vocabulary=VOCABULARY, seed=3),
            reference_updates=updates,
        )

    whole, resumed = fresh(), fresh()
    whole.step(made())
    checkpoint = whole.save(tmp_path, {})
    expected = whole.step(made(1))

    resumed.resume(checkpoint)
    got = resumed.step(made(1))

    assert (got["loss"], got["kl"]) == (expected["loss"], expected["kl"])
    assert all(torch.equal(tensor, resumed.weights()[name]) for name, tensor in whole.weights().items())


def test_updates_need_a_reference_of_the_model_s_own_shape() -> None:
    with pytest.raises(ValueError, match="reference_updates: expected with a reference, got none"):
        trainer(reference_updates=ReferenceUpdates())
    with pytest.raises(WeightsMismatch, match="the reference, which is to be updated, does not fit the model"):
        trainer(reference=TinyModel(vocabulary=VOCABULARY, width=8), reference_updates=ReferenceUpdates())


@pytest.mark.parametrize("wrong", [{"every": 0}, {"share": 0.0}, {"share": 1.5}, {"share": float("nan")}])
def test_a_number_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((InvalidConfig, ValueError), match=next(iter(wrong))):
        ReferenceUpdates(**wrong)
