"""Every family of transformers in docs/models.md computes what transformers computes, in each use of penstock."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from anyio import to_thread
from tests.cells import cells
from tests.models_hf import families
from tests.models_hf.packed import logits_of_transformers
from torch import Tensor

from penstock import Worker
from penstock.losses import AdvantageWeighted
from penstock.models import HFModel, LoRA, export
from penstock.policies import SamplingParams
from penstock.testing import batch
from penstock.torch import Attention, TorchPolicy, TorchTrainer
from penstock.weights import WeightPublisher

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-5

WITH_STATES = [
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "mamba",
    "mamba2",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "recurrent_gemma",
    "zamba2",
]
"""Families with layers that keep a state of the tokens before."""

MIXTURES = ["gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"]
"""Families with experts, of which transformers stacks the weights."""

OFTEN = ["falcon_h1", "gpt_oss", "kimi_linear", "qwen3_5", "recurrent_gemma"]
"""Families that `make test` runs, of each kind of layers and caches."""

SGD = partial(torch.optim.SGD, lr=0.1)


def saved(family: str, tmp_path: Path) -> Path:
    """Return the folder of a tiny model of `family`."""
    into = tmp_path / "model"
    families.made(family).save_pretrained(into)
    return into


@pytest.mark.parametrize(
    "family", cells(families.in_the_table(), run=[*OFTEN, "llama", "lfm2", "nemotron_h", "mamba2"])
)
def test_a_family_computes_what_transformers_computes(family: str, tmp_path: Path) -> None:
    folder = saved(family, tmp_path)
    found = families.differences(folder)

    assert found.within(), found
    assert found.packs == families.in_the_table()[family]


def trained(folder: Path, **options: Any) -> tuple[HFModel, TorchTrainer]:
    """Return a model after a step on sequences of several lengths, and its trainer."""
    torch.manual_seed(0)
    model = HFModel.from_pretrained(folder, **options)
    trainer = TorchTrainer(model, optimizer=SGD, loss=AdvantageWeighted(), micro_batch_tokens=64)
    packed = batch(groups=2, completion_lengths=[4, 6], prompt_length=2, advantages=np.linspace(-1, 1, 14))
    trainer.step(msgspec.structs.replace(packed, tokens=1 + packed.tokens % 60))
    model.eval()
    return model, trainer


@torch.no_grad()
def logits_of(model: HFModel, tokens: Tensor) -> Tensor:
    attend = Attention.packed(torch.zeros_like(tokens)[None], one_sequence=True)
    found: Tensor = model(tokens[None], positions=torch.arange(len(tokens))[None], attend=attend)[0]
    return found


SEQUENCE = torch.tensor([3, 9, 27, 17, 51, 25, 11])


@pytest.mark.parametrize("family", cells([*WITH_STATES, "gpt_oss"], run=OFTEN))
def test_a_step_is_the_same_with_checkpointed_activations(family: str, tmp_path: Path) -> None:
    folder = saved(family, tmp_path)
    plain, _ = trained(folder)
    checkpointed, _ = trained(folder, gradient_checkpointing=True)

    torch.testing.assert_close(plain.state_dict(), checkpointed.state_dict(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("lora", [None, LoRA(rank=2)], ids=["whole", "adapters"])
@pytest.mark.parametrize("family", cells([*WITH_STATES, *MIXTURES], run=[*OFTEN, "mixtral"]))
def test_a_trained_model_is_exported_as_transformers_loads_it(family: str, lora: LoRA | None, tmp_path: Path) -> None:
    folder = saved(family, tmp_path)
    model, trainer = trained(folder, lora=lora)

    exported = export(trainer.save(tmp_path / "checkpoints", {}), tmp_path / "exported")

    expected = logits_of(model, SEQUENCE)
    assert not torch.equal(expected, logits_of(HFModel.from_pretrained(folder), SEQUENCE))
    torch.testing.assert_close(logits_of_transformers(exported, SEQUENCE), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", cells([*WITH_STATES, "gpt_oss"], run=OFTEN))
async def test_published_weights_are_sampled_as_they_are_trained(family: str, tmp_path: Path) -> None:
    folder = await to_thread.run_sync(saved, family, tmp_path)
    model, trainer = await to_thread.run_sync(trained, folder)
    prompts = [np.array(prompt, np.int32) for prompt in ([5, 6], [7, 1, 2, 9, 3], [8, 8, 8], [4])]

    async with WeightPublisher(model) as publisher:
        await publisher.publish(trainer.weights(), 1)
        policy = TorchPolicy(partial(HFModel.empty, folder), eos_id=0, weights=publisher.url, max_rows=3)
        async with policy.open(Worker()) as engine:
            completions = await engine.generate(prompts, SamplingParams(max_completion_tokens=6, seed=1))

    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = torch.from_numpy(np.concatenate([prompt, completion.tokens])).long()
        scores = logits_of(model, tokens).log_softmax(-1)[len(prompt) - 1 : -1]
        expected = scores.gather(1, tokens[len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(completion.logprobs), expected, rtol=0, atol=TOLERANCE)
