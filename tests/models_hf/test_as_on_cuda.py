"""An HFModel with the kernels of a CUDA device, pretended on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.as_on_cuda import as_on_cuda
from tests.models_hf.packed import packed_rows
from torch import Tensor

from penstock import TrainBatch
from penstock.models import HFModel
from penstock.testing import batch
from penstock.torch import TorchTrainer

ModelFolder = Callable[[str], Path]

ROWS = [[torch.arange(n) * 7 % 300 for n in (30,)], [torch.arange(n) * 5 % 300 for n in (18, 10)]]

NARROW = torch.bfloat16

SGD = partial(torch.optim.SGD, lr=1.0)


def given() -> TrainBatch:
    lengths = [3, 17, 9, 12, 5, 17]
    advantages = np.linspace(-1, 1, sum(lengths) + 4 * len(lengths))
    packed = batch(groups=1, completion_lengths=lengths, prompt_length=4, advantages=advantages)
    return msgspec.structs.replace(packed, tokens=packed.tokens % 300)


def gradients(model: HFModel, **options: Any) -> tuple[float, Tensor]:
    """Return the loss of a step of gradient descent, and how it changed the tensors."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loss = TorchTrainer(model, optimizer=SGD, max_grad_norm=None, **options).step(given())["loss"]
    return loss, torch.cat([(before[name] - each).flatten() for name, each in model.state_dict().items()])


KERNELS = {
    "llama": {"varlen_attn": 2},
    "qwen2": {"varlen_attn": 2},
    "qwen3": {"varlen_attn": 2},
    "gemma": {"varlen_attn": 2},
    "mistral": {"varlen_attn, window": 2},
    "gemma 3": {"varlen_attn": 1, "varlen_attn, window": 1},
}
"""The kernels of both layers of each family."""


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", KERNELS)
def test_packed_rows_have_the_logits_of_float32_but_for_rounding(family: str, model_folder: ModelFolder) -> None:
    model = HFModel.from_pretrained(model_folder(family))
    tokens, positions, attend = packed_rows(*ROWS)

    with torch.no_grad():
        exact = model(tokens, positions=positions, attend=attend)
        with as_on_cuda() as calls, torch.autocast("cpu", NARROW):
            logits = model(tokens, positions=positions, attend=attend)

    assert calls == KERNELS[family] | {"mm.dtype": 1}
    assert logits.dtype == torch.float32
    real = attend.sequences >= 0
    assert float((logits[real] - exact[real]).norm() / exact[real].norm()) < 0.02


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "computed again"])
def test_gradients_are_those_of_the_mask_but_for_rounding(*, checkpointing: bool, model_folder: ModelFolder) -> None:
    made = partial(HFModel.from_pretrained, model_folder("qwen2"))

    expected, exact = gradients(made())
    masked, plain = gradients(made(), autocast=NARROW)
    with as_on_cuda() as calls:
        loss, found = gradients(made(gradient_checkpointing=checkpointing), autocast=NARROW)

    assert calls["varlen_attn"]
    assert calls["addmm.dtype"]
    assert loss == pytest.approx(expected, abs=2e-3)
    assert masked == pytest.approx(expected, abs=2e-3)
    assert (found - exact).norm() < 1.5 * (plain - exact).norm()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", KERNELS)
def test_in_one_dtype_the_starts_of_sequences_give_the_logits_and_gradients_of_the_mask(
    family: str, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, positions, attend = packed_rows(*ROWS)
    made = [HFModel.from_pretrained(model_folder(family)) for _ in range(2)]
    monkeypatch.setattr("penstock._stages.contracts.varlen.DTYPES", {torch.float32})

    def logits(model: HFModel) -> Tensor:
        found: Tensor = model(tokens, positions=positions, attend=attend)[attend.sequences >= 0]
        torch.autograd.backward(found.logsumexp(-1).mean())
        return found

    with as_on_cuda() as calls:
        found = logits(made[0])
    expected = logits(made[1])

    assert calls == KERNELS[family]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    for one, other in zip(*(model.parameters() for model in made), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("one_thread")
def test_dropout_keeps_the_mask(model_folder: ModelFolder) -> None:
    model = HFModel.from_pretrained(model_folder("llama"))
    for layer in model.module.model.layers:
        layer.self_attn.attention_dropout = 0.5
    tokens, positions, attend = packed_rows(*ROWS)

    def logits() -> Tensor:
        torch.manual_seed(0)
        with torch.no_grad(), torch.autocast("cpu", NARROW):
            found: Tensor = model.train()(tokens, positions=positions, attend=attend)
        return found[attend.sequences >= 0]

    with as_on_cuda() as calls:
        found = logits()

    assert "varlen_attn" not in calls
    assert float((found - logits()).norm() / found.norm()) < 0.02


def test_the_kernel_that_trains_is_the_one_whose_packing_is_tried(model_folder: ModelFolder) -> None:
    model = HFModel.from_pretrained(model_folder("llama"), dtype=NARROW)
    model._packs.clear()

    with as_on_cuda() as calls:
        model.check_packing()

    assert calls["varlen_attn"] == 4
