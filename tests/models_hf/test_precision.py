"""A run in half precision: samplers compute as the trainer does, so that ratios between both are 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from anyio import to_thread
from numpy.typing import NDArray
from tests.fake_policy import Letters
from tests.run_parts import run_parts
from torch import Tensor, nn

from penstock import Context, TrainBatch, Worker
from penstock.models import HFModel
from penstock.policies import Completion, SamplingParams
from penstock.runs import load_run_config
from penstock.testing import batch, entered
from penstock.torch import TorchPolicy, TorchTrainer
from penstock.weights import WeightPublisher

pytestmark = pytest.mark.usefixtures("one_thread")

ModelFolder = Callable[[str], Path]

PROMPT, LENGTH, COMPLETIONS = 4, 40, 32


class Dtypes:
    """Notes in which dtypes the layers and the head of a model compute."""

    def __init__(self) -> None:
        self.layers: set[torch.dtype] = set()
        self.head: set[torch.dtype] = set()

    def watch(self, model: Any) -> Any:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                seen = self.head if name == "lm_head" else self.layers
                module.register_forward_hook(partial(self._seen, seen))
        return model

    @staticmethod
    def _seen(seen: set[torch.dtype], _module: nn.Module, _given: Any, found: Tensor) -> None:
        seen.add(found.dtype)


def prompts() -> list[NDArray[np.int32]]:
    return [(np.arange(PROMPT, dtype=np.int32) * 5 + row) % 300 for row in range(COMPLETIONS)]


async def sampled(policy: TorchPolicy) -> list[Completion]:
    with entered(Context(tokenizer=Letters())):
        async with policy.open(Worker()) as engine:
            return await engine.generate(prompts(), SamplingParams(max_completion_tokens=LENGTH, stop_ids=()))


def batch_of(completions: list[Completion]) -> TrainBatch:
    lengths = [len(each.tokens) for each in completions]
    packed = batch(groups=1, completion_lengths=lengths, prompt_length=PROMPT)
    rows = [np.concatenate([given, each.tokens]) for given, each in zip(prompts(), completions, strict=True)]
    logprobs = np.zeros(len(packed.tokens), np.float32)
    logprobs[packed.loss_mask] = np.concatenate([each.logprobs for each in completions if each.logprobs is not None])
    return msgspec.structs.replace(
        packed, tokens=np.concatenate(rows), behavior_logprobs=logprobs, advantages=np.ones_like(logprobs)
    )


def divergence_from(folder: Path, sampled: TrainBatch, dtype: torch.dtype) -> float:
    """Return the divergence of `sampled` from a trainer in `dtype` that has the same weights."""
    sgd = partial(torch.optim.SGD, lr=1e-9)
    trainer = TorchTrainer(HFModel.from_pretrained(folder), optimizer=sgd, autocast=dtype)
    return trainer.step(sampled)["kl"]


async def test_a_policy_with_autocast_computes_its_layers_in_bfloat16_and_its_head_in_float32(
    model_folder: ModelFolder,
) -> None:
    seen = Dtypes()
    make = partial(HFModel.from_pretrained, model_folder("qwen2"))

    await sampled(TorchPolicy(lambda: seen.watch(make()), eos_id=0, autocast=torch.bfloat16))

    assert (seen.layers, seen.head) == ({torch.bfloat16}, {torch.float32})


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
async def test_a_configured_run_samples_in_its_precision_with_the_weights_of_its_trainer(
    precision: str, model_folder: ModelFolder
) -> None:
    values = {"model": {"path": str(model_folder("qwen2")), "precision": precision}, "data": {"path": "rows.jsonl"}}
    parts = await to_thread.run_sync(run_parts, load_run_config(values | {"reward": {}}))
    model = await to_thread.run_sync(parts.model)
    seen = Dtypes()

    async with WeightPublisher(model) as publisher:
        await publisher.publish(model.state_dict(), 0)
        policy = parts.policy(publisher.url)
        assert isinstance(policy, TorchPolicy)
        make = policy.make_model
        await sampled(replace(policy, make_model=lambda: seen.watch(make())))

    assert (seen.layers, seen.head) == ({getattr(torch, precision)}, {torch.float32})


async def test_a_configured_run_publishes_what_does_not_train_in_its_base_dtype(model_folder: ModelFolder) -> None:
    values: dict[str, Any] = {"model": {"path": str(model_folder("qwen2")), "base_dtype": "bfloat16"}}
    rest: dict[str, Any] = {"data": {"path": "rows.jsonl"}, "reward": {}, "algorithm": {"kl": 0.1}}
    parts = await to_thread.run_sync(run_parts, load_run_config(values | rest))
    model = await to_thread.run_sync(parts.model)
    reference = await to_thread.run_sync(parts.reference, model)
    assert reference is not None
    made: list[HFModel] = []

    async with WeightPublisher(model, cast=parts.published_as) as publisher:
        await publisher.publish(model.state_dict(), 0)
        policy = parts.policy(publisher.url)
        assert isinstance(policy, TorchPolicy)
        make = policy.make_model
        packed = batch_of(await sampled(replace(policy, make_model=lambda: _kept(made, make()))))

    trained = parts.trainer(model, reference).step(packed)
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    assert {each.dtype for each in [*reference.parameters(), *made[0].parameters()]} == {torch.bfloat16}
    assert 0 < trained["kl"] < 1e-3


async def test_a_model_with_tables_samples_in_bfloat16_with_those_of_its_trainer(model_folder: ModelFolder) -> None:
    model: dict[str, Any] = {"path": str(model_folder("gemma 3")), "base_dtype": "bfloat16"}
    placement = {"sampler_device": "cpu:0"}  # a device of its own, to which weights are copied
    values = {"model": model, "data": {"path": "rows.jsonl"}, "reward": {}, "placement": placement}
    parts = await to_thread.run_sync(run_parts, load_run_config(values))
    trains = await to_thread.run_sync(parts.model)

    async with WeightPublisher(trains, cast=parts.published_as) as publisher:
        await publisher.publish(trains.state_dict(), 0)
        policy = parts.policy(publisher.url)
        assert isinstance(policy, TorchPolicy)
        completions = await sampled(policy)

    assert len(completions) == COMPLETIONS


def _kept(made: list[HFModel], model: Any) -> HFModel:
    made.append(model)
    return made[0]


async def test_the_base_of_adapters_has_the_base_dtype_and_the_adapters_are_float32(model_folder: ModelFolder) -> None:
    model: dict[str, Any] = {"path": str(model_folder("qwen2")), "base_dtype": "bfloat16", "lora": {"rank": 2}}
    values = {"model": model, "data": {"path": "rows.jsonl"}, "reward": {}}
    parts = await to_thread.run_sync(run_parts, load_run_config(values))

    trains = await to_thread.run_sync(parts.model)
    policy = parts.policy(None)
    assert isinstance(policy, TorchPolicy)
    for each in (trains, await to_thread.run_sync(policy.make_model)):
        assert isinstance(each, HFModel)
        assert {one.dtype for one in each.parameters() if one.requires_grad} == {torch.float32}
        assert {one.dtype for one in each.parameters() if not one.requires_grad} == {torch.bfloat16}
    assert parts.published_as == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
async def test_samples_of_the_same_dtype_are_the_nearest_to_the_log_probabilities_of_a_trainer(
    dtype: torch.dtype, model_folder: ModelFolder
) -> None:
    folder = model_folder("qwen2")
    divergence = {}
    for autocast in (dtype, None):
        policy = TorchPolicy(partial(HFModel.from_pretrained, folder), eos_id=0, autocast=autocast)
        packed = batch_of(await sampled(policy))
        divergence[autocast] = await to_thread.run_sync(divergence_from, folder, packed, dtype)

    assert divergence[dtype] < divergence[None]
