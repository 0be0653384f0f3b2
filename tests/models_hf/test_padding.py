"""Rows are filled up with tokens of their own: a model need not compute anything for token 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers

from penstock import Worker
from penstock.losses import AdvantageWeighted
from penstock.models import HFModel
from penstock.policies import SamplingParams
from penstock.testing import batch
from penstock.torch import TorchPolicy, TorchTrainer

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE: dict[str, Any] = {
    "vocab_size": 100,
    "vocab_size_per_layer_input": 100,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 1,
    "head_dim": 16,
    "laurel_rank": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.0] * 4,
    "sliding_window": 8,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a Gemma 3n, whose embedding of token 0 is zero, where its gradient is not finite."""
    path = tmp_path_factory.mktemp("gemma3n")
    torch.manual_seed(0)
    config = transformers.Gemma3nTextConfig(**SHAPE, pad_token_id=98)  # torch drops the gradient of this row
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config)
    model.get_input_embeddings().weight.data[0] = 0
    model.save_pretrained(path)
    return path


@pytest.fixture
def model(folder: Path) -> HFModel:
    return HFModel.from_pretrained(folder)


def test_the_steps_of_padded_rows_are_those_of_rows_without_padding(folder: Path) -> None:
    packed = batch(groups=2, completion_lengths=[3, 9], prompt_length=4, advantages=np.linspace(-1, 1, 20))
    packed = msgspec.structs.replace(packed, tokens=packed.tokens % 99 + 1)
    norms = []
    for micro_batch_tokens in (None, 1):
        trainer = TorchTrainer(
            HFModel.from_pretrained(folder),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
            loss=AdvantageWeighted(),
            micro_batch_tokens=micro_batch_tokens,
        )
        norms.append(trainer.step(packed)["grad_norm"])

    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


async def test_a_prompt_is_sampled_beside_longer_ones_as_alone(model: HFModel) -> None:
    short, long = np.array([5], np.int32), np.arange(1, 12, dtype=np.int32)
    sampling = SamplingParams(max_completion_tokens=6, greedy=True)

    async with TorchPolicy(lambda: model, eos_id=99).open(Worker()) as engine:
        (alone,) = await engine.generate([short], sampling)
        beside, _ = await engine.generate([short, long], sampling)

    assert beside.tokens.tolist() == alone.tokens.tolist()
