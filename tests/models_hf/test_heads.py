"""The head of an HFModel, apart from its hidden states: the same numbers, in little memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from tests.models_hf.conftest import FAMILIES, SMALL
from tests.stages.training.no_tensor_of import NoTensorOf
from torch import Tensor

from penstock import TrainBatch
from penstock._stages.losses import tiles
from penstock._stages.losses.distributions import Distributions
from penstock.losses import KL, AdvantageWeighted, Entropy, PPOClip
from penstock.models import HFModel, LoRA
from penstock.testing import batch
from penstock.torch import Attention, TorchTrainer

ModelFolder = Callable[[str], Path]

TOKENS = torch.arange(12)[None] * 5 % 300
POSITIONS, ATTEND = torch.arange(12)[None], Attention.packed(torch.zeros(1, 12, dtype=torch.int64))
SGD = partial(torch.optim.SGD, lr=0.1)

AFTER_THE_HEAD: dict[str, dict[str, Any]] = {
    "Gemma2": {"head_dim": 8, "final_logit_softcapping": 0.5},
    "Granite": {"logits_scaling": 7.0},
    "Cohere": {"logit_scale": 0.25},
}
"""Models that do something to the products of the head."""


def given(*lengths: int) -> TrainBatch:
    columns = {"prompt_length": 2, "advantages": np.ones(sum(lengths) + 2 * len(lengths))}
    packed = batch(groups=1, completion_lengths=list(lengths), **columns)
    return msgspec.structs.replace(packed, tokens=packed.tokens % 300)


def logprobs_by_parts(model: HFModel, *, apart: bool = True) -> Tensor:
    """Return the log-probabilities of hidden states and head, which `model` must give apart."""

    def read(hidden: Tensor, weight: Tensor | None, bias: Tensor | None = None, finish: Any = None) -> Tensor:
        assert (weight is not None) == apart
        return Distributions(hidden[0], weight, bias, finish).whole()

    found: Tensor = model(TOKENS, positions=POSITIONS, attend=ATTEND, read=read)
    return found


def whole(model: HFModel) -> Tensor:
    return torch.log_softmax(model(TOKENS, positions=POSITIONS, attend=ATTEND), -1)[0]


def made(folder: Path, name: str, **options: Any) -> HFModel:
    config = getattr(transformers, f"{name}Config")(**SMALL | {"eos_token_id": 0, "pad_token_id": 0} | options)
    auto: Any = transformers.AutoModelForCausalLM
    auto.from_config(config).save_pretrained(folder)
    return HFModel.from_pretrained(folder, attention="eager")


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_hidden_states_and_head_make_the_logits(family: str, model_folder: ModelFolder) -> None:
    model = HFModel.from_pretrained(model_folder(family), attention="eager")

    torch.testing.assert_close(logprobs_by_parts(model), whole(model))


@pytest.mark.parametrize("name", AFTER_THE_HEAD)
@torch.no_grad()
def test_so_they_do_where_a_model_bounds_or_scales_its_logits(name: str, tmp_path: Path) -> None:
    model = made(tmp_path, name, **AFTER_THE_HEAD[name])

    torch.testing.assert_close(logprobs_by_parts(model), whole(model))


@torch.no_grad()
def test_a_model_that_does_something_unknown_to_its_logits_gives_them_whole(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = transformers.LlamaForCausalLM.forward

    def doubled(self: Any, *args: Any, **options: Any) -> Any:
        found: Any = own(self, *args, **options)
        found.logits = found.logits * 2
        return found

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", doubled)
    model = HFModel.from_pretrained(model_folder("llama"))

    torch.testing.assert_close(logprobs_by_parts(model, apart=False), whole(model))


def test_adapters_of_the_head_train(model_folder: ModelFolder) -> None:
    model = HFModel.from_pretrained(model_folder("llama"), lora=LoRA(rank=2, targets=("lm_head", "q_proj")))
    trainer = TorchTrainer(model, optimizer=SGD, loss=AdvantageWeighted())

    trainer.step(given(3, 9, 5))

    moved = {name for name, tensor in model.state_dict().items() if ".lora_B." in name and tensor.any()}
    assert "base_model.model.lm_head.lora_B.weight" in moved
    with torch.no_grad():
        torch.testing.assert_close(logprobs_by_parts(model, apart=False), whole(model))


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("lora", [None, LoRA(rank=2)], ids=["whole", "adapters"])
def test_a_step_makes_no_tensor_of_all_tokens_and_the_vocabulary(
    family: str, lora: LoRA | None, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a reference, by micro-batches; the gradients are those of one chunk."""

    def stepped() -> tuple[dict[str, float], Mapping[str, Tensor]]:
        torch.manual_seed(0)
        model = HFModel.from_pretrained(model_folder(family), lora=lora)
        reference = HFModel.from_pretrained(model_folder(family)) if lora is None else model.reference()
        loss = PPOClip() + 0.1 * KL() - 0.1 * Entropy()
        options: dict[str, Any] = {"temperature": 0.7, "micro_batch_tokens": None, "reference": reference}
        trainer = TorchTrainer(model, optimizer=SGD, loss=loss, **options)
        return trainer.step(long), trainer.weights()

    long = given(78, 80)
    expected, weights = stepped()
    monkeypatch.setattr(tiles, "NUMBERS_OF_A_TILE", 8 * 320)

    with NoTensorOf(long.loss_tokens * 320 // 2):
        found, moved = stepped()

    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(moved[name], tensor)
