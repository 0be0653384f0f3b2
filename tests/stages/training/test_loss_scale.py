"""Training in float16: the loss is scaled, and a gradient that overflows is computed again with half of the scale."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from tests.tiny_model import TinyModel
from torch import Tensor

from penstock import TrainBatch
from penstock.losses import AdvantageWeighted
from penstock.testing import batch
from penstock.torch import TorchTrainer

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 11

INITIAL_SCALE = 2.0**16


def made(seed: int = 0, advantage: float | None = None) -> TrainBatch:
    """Return a batch of random tokens, and of random advantages or of one."""
    numbers = np.random.default_rng(seed)
    packed = batch(groups=2, completion_lengths=[3, 7, 5])
    drawn = numbers.standard_normal(len(packed.tokens)) if advantage is None else np.full(len(packed.tokens), advantage)
    tokens = numbers.integers(0, VOCABULARY, len(packed.tokens)).astype(np.int32)
    return msgspec.structs.replace(packed, tokens=tokens, advantages=drawn.astype(np.float32))


def trainer(autocast: torch.dtype | None = torch.float16, **options: Any) -> TorchTrainer:
    given: dict[str, Any] = {"optimizer": partial(torch.optim.AdamW, lr=0.01), "loss": AdvantageWeighted()} | options
    return TorchTrainer(TinyModel(vocabulary=VOCABULARY), autocast=autocast, **given)


def untimed(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(("timing_s/", "weights/"))}


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_trainer_in_float16_learns_and_keeps_its_weights_in_float32() -> None:
    each = trainer(optimizer=partial(torch.optim.AdamW, lr=0.03))

    losses = [each.step(made(advantage=1.0))["loss"] for _ in range(6)]

    assert losses[-1] < losses[0] - 0.5
    assert {tensor.dtype for tensor in each.weights().values()} == {torch.float32}


def test_gradients_that_float16_would_round_to_zero_are_those_of_float32() -> None:
    faint = made(advantage=1e-6)

    norms = [trainer(autocast).step(faint)["grad_norm"] for autocast in (torch.float16, None)]

    assert norms[0] == pytest.approx(norms[1], rel=0.02)


def test_a_gradient_that_overflows_is_reported_and_computed_again_until_the_batch_trains() -> None:
    strong = made(advantage=1e3)
    sgd: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=0.1)}
    scaled, exact = trainer(**sgd), trainer(None, **sgd)

    with capture_logs() as logs:
        metrics = scaled.step(strong)
    exact.step(strong)

    skipped = metrics["skipped_updates"]
    assert skipped > 0
    assert metrics["loss_scale"] == INITIAL_SCALE / 2**skipped
    assert [each["event"] for each in logs] == ["update_skipped"] * int(skipped)
    assert scaled.steps == 1
    for name, tensor in exact.weights().items():
        torch.testing.assert_close(scaled.weights()[name], tensor, atol=2e-3, rtol=0)


def test_a_batch_without_overflow_reports_the_scale_and_no_skipped_update() -> None:
    metrics = trainer().step(made())

    assert (metrics["loss_scale"], metrics["skipped_updates"]) == (INITIAL_SCALE, 0.0)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_other_dtypes_have_no_scale(autocast: torch.dtype | None) -> None:
    assert not {"loss_scale", "skipped_updates"} & trainer(autocast).step(made()).keys()


def test_a_gradient_that_is_not_finite_at_any_scale_ends_the_step_and_leaves_the_model() -> None:
    class Broken(TinyModel):
        def hidden(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().hidden(*args, **kwargs) * torch.inf

    each = TorchTrainer(Broken(vocabulary=VOCABULARY), optimizer=torch.optim.SGD, autocast=torch.float16)
    before = {name: tensor.clone() for name, tensor in each.weights().items()}

    with pytest.raises(FloatingPointError, match="expected a finite gradient in step 1, got norm nan"):
        each.step(made())

    assert_equal(each.weights(), before)
    assert each.steps == 0


def test_a_resumed_trainer_continues_with_the_scale_bit_for_bit(tmp_path: Path) -> None:
    whole, resumed = trainer(), trainer()
    lowered = whole.step(made(advantage=1e3))["loss_scale"]
    checkpoint = whole.save(tmp_path, {})
    expected = untimed(whole.step(made(1)))

    resumed.resume(checkpoint)

    assert lowered < INITIAL_SCALE
    assert untimed(resumed.step(made(1))) == expected
    assert expected["loss_scale"] == lowered
    assert_equal(resumed.weights(), whole.weights())


@pytest.mark.parametrize(("before", "after"), [(None, torch.float16), (torch.float16, torch.bfloat16)])
def test_a_run_may_continue_in_another_dtype(
    before: torch.dtype | None, after: torch.dtype | None, tmp_path: Path
) -> None:
    first, continued = trainer(before), trainer(after)
    first.step(made())

    continued.resume(first.save(tmp_path, {}))

    assert continued.step(made(1)).get("loss_scale") == (INITIAL_SCALE if after == torch.float16 else None)
