"""The gradient of an embedding that shares its matrix with the head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from tests.as_on_cuda import Operators
from tests.models_hf.conftest import SMALL
from torch import Tensor

from penstock import TrainBatch
from penstock.losses import AdvantageWeighted
from penstock.models import HFModel
from penstock.testing import batch
from penstock.torch import Attention, TorchTrainer

pytestmark = pytest.mark.usefixtures("one_thread")

ModelFolder = Callable[[str], Path]

TOKENS = torch.tensor([[5, 7, 5, 0, 0, 9, 5]])
"""Some of them repeated; 0 is the padding token of the models."""

POSITIONS, ATTEND = torch.arange(7)[None], Attention.packed(torch.zeros(1, 7, dtype=torch.int64), one_sequence=True)

OF_EMBEDDING = "aten.embedding_dense_backward.default"


def given() -> TrainBatch:
    lengths = [3, 9, 5]
    packed = batch(groups=1, completion_lengths=lengths, prompt_length=2, advantages=np.ones(23))
    return msgspec.structs.replace(packed, tokens=packed.tokens % 300)


def logprobs(model: Any) -> Tensor:
    logits: Tensor = model(TOKENS, positions=POSITIONS, attend=ATTEND)
    return logits.log_softmax(-1).diagonal(dim1=-2, dim2=-1)


def changes(model: HFModel, tokens: int | None) -> dict[str, Tensor]:
    """Return how a step of gradient descent by micro-batches of `tokens` changes the tensors."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sgd, loss = partial(torch.optim.SGD, lr=1.0), AdvantageWeighted()
    TorchTrainer(model, optimizer=sgd, loss=loss, max_grad_norm=None, micro_batch_tokens=tokens).step(given())
    return {name: before[name] - tensor for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("tokens", [None, 12], ids=["one micro-batch", "several"])
def test_a_step_has_the_gradient_of_transformers_embedding_without_making_it(
    tokens: int | None, model_folder: ModelFolder
) -> None:
    plain = HFModel.from_pretrained(model_folder("qwen2"))
    del plain.module.get_input_embeddings().forward  # that of transformers
    with Operators() as expected_operators:
        expected = changes(plain, tokens)

    with Operators() as operators:
        found = changes(HFModel.from_pretrained(model_folder("qwen2")), tokens)

    assert OF_EMBEDDING in expected_operators.names
    assert OF_EMBEDDING not in operators.names
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_without_a_head_that_adds_its_gradient_it_is_returned(model_folder: ModelFolder) -> None:
    model = HFModel.from_pretrained(model_folder("qwen2"))
    expected: Any = transformers.AutoModelForCausalLM.from_pretrained(model_folder("qwen2"), dtype=torch.float32)
    of_transformers = expected(TOKENS, use_cache=False).logits.log_softmax(-1).diagonal(dim1=-2, dim2=-1)
    torch.autograd.backward(of_transformers.sum())
    weight = model.module.get_input_embeddings().weight

    for _ in range(2):
        torch.autograd.backward(logprobs(model).sum())
    (alone,) = torch.autograd.grad(logprobs(model).sum(), [weight])

    exact = expected.get_input_embeddings().weight.grad
    torch.testing.assert_close(alone, exact, atol=1e-5, rtol=0)
    torch.testing.assert_close(weight.grad, 2 * exact, atol=2e-5, rtol=0)
    assert not exact[0].equal(torch.zeros_like(exact[0]))  # the head's, for the padding token has none of its own


@pytest.mark.parametrize(
    ("name", "options"),
    [("Qwen2", {"tie_word_embeddings": False}), ("Gemma", {"head_dim": 8})],
    ids=["a head of its own", "scaled"],
)
def test_other_embeddings_stay_as_they_are(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    config = getattr(transformers, f"{name}Config")(**SMALL | {"eos_token_id": 0, "pad_token_id": 0} | options)
    auto: Any = transformers.AutoModelForCausalLM
    auto.from_config(config).save_pretrained(tmp_path)

    with Operators() as operators:
        changes(HFModel.from_pretrained(tmp_path), None)

    assert OF_EMBEDDING in operators.names
