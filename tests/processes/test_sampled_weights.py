"""The torch policy on weights that are published over a real segment and a real socket."""

from functools import partial

import anyio
import numpy as np
import pytest
import torch
from anyio.lowlevel import checkpoint
from tests.tiny_model import TinyModel

from penstock.pipeline.context import Worker
from penstock.pipeline.errors import WeightsMismatch
from penstock.pipeline.weight_publisher import WeightPublisher
from penstock.stages.policies import Completion, Sampler
from penstock.stages.torch_policy import TorchPolicy

PROMPT = np.array([1, 2], np.int32)
EOS = 99


async def one(sampler: Sampler) -> Completion:
    (completion,) = await sampler.sample([PROMPT], max_tokens=8, greedy=True)
    return completion


async def untrained(seed: int) -> list[int]:
    """What a model that was made with `seed` says."""
    async with TorchPolicy(partial(TinyModel, seed=seed), EOS).open(Worker()) as sampler:
        completion = await one(sampler)
        return [int(token) for token in completion.tokens]


async def test_each_batch_is_sampled_with_the_newest_version_and_says_which() -> None:
    async with WeightPublisher(TinyModel().state_dict()) as publisher:
        policy = TorchPolicy(partial(TinyModel, seed=7), EOS, weights=publisher.url)
        async with policy.open(Worker()) as sampler:
            await publisher.publish(TinyModel(seed=1).state_dict(), version=10)
            first = await one(sampler)
            await publisher.publish(TinyModel(seed=2).state_dict(), version=20)
            second = await one(sampler)

            assert sampler.version == 20

    assert first.tokens.tolist() == await untrained(1)
    assert second.tokens.tolist() == await untrained(2)
    assert (set(first.policy_versions.tolist()), set(second.policy_versions.tolist())) == ({10}, {20})


async def test_nothing_is_sampled_before_the_first_version() -> None:
    said: list[Completion] = []

    async def ask(sampler: Sampler) -> None:
        said.append(await one(sampler))

    async with (
        WeightPublisher(TinyModel().state_dict()) as publisher,
        TorchPolicy(TinyModel, EOS, weights=publisher.url).open(Worker()) as sampler,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(ask, sampler)
        for _ in range(100):
            await checkpoint()
        assert not said
        await publisher.publish(TinyModel().state_dict(), version=0)

    assert set(said[0].policy_versions.tolist()) == {0}


async def test_a_pause_waits_for_the_batch_and_holds_the_next_until_it_ends() -> None:
    said: list[Completion] = []

    async def ask(sampler: Sampler) -> None:
        said.append(await one(sampler))

    async with WeightPublisher(TinyModel().state_dict()) as publisher:
        await publisher.publish(TinyModel().state_dict(), version=0)
        async with (
            TorchPolicy(TinyModel, EOS, weights=publisher.url).open(Worker()) as sampler,
            anyio.create_task_group() as tasks,
            publisher.paused(),
        ):
            tasks.start_soon(ask, sampler)
            await publisher.publish(TinyModel(seed=1).state_dict(), version=1)
            for _ in range(100):
                await checkpoint()
            assert not said

    assert set(said[0].policy_versions.tolist()) == {1}


async def test_weights_that_do_not_fit_the_model_are_refused_when_the_policy_opens() -> None:
    async with WeightPublisher({"head.weight": torch.zeros(3)}) as publisher:
        with pytest.raises(WeightsMismatch, match=r"head\.weight: expected float32 \[11, 16\], found float32 \[3\]"):
            async with TorchPolicy(TinyModel, EOS, weights=publisher.url).open(Worker()):
                pass
