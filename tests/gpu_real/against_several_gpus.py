"""Several GPUs of a machine: a model and its versions on the second one, and copies between them."""

from __future__ import annotations

from functools import partial

import anyio.to_thread
import msgspec
import numpy as np
import pytest
import torch
from tests.gpu_real.versions import Model, tensors
from tests.kernel_paths import far
from tests.stages.engines.test_torch_policy import EOS, PROMPTS
from tests.tiny_model import TinyModel

from penstock import Worker
from penstock.policies import SamplingParams
from penstock.testing import batch
from penstock.torch import TorchPolicy, TorchTrainer
from penstock.weights import WeightPublisher, WeightSubscriber

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has one GPU")

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


async def test_versions_in_the_memory_of_the_second_gpu_are_views_there() -> None:
    async with WeightPublisher(Model(SECOND), device="cuda:1") as publisher:
        await publisher.publish(tensors(3, SECOND), 3)
        async with WeightSubscriber(publisher.url) as subscriber:
            model = Model("meta")
            subscriber.attach(model)
            subscriber.refresh()
            assert all(tensor.device == SECOND for tensor in model.buffers())
            assert all(torch.equal(model.get_buffer(name), each) for name, each in tensors(3, SECOND).items())


async def test_versions_of_one_gpu_are_copied_into_a_model_on_another() -> None:
    model = Model(SECOND)
    async with WeightPublisher(Model(FIRST), device="cuda:0") as publisher:
        await publisher.publish(tensors(3, FIRST), 3)
        async with WeightSubscriber(publisher.url) as subscriber:
            subscriber.attach(model, copied=True)
            await anyio.to_thread.run_sync(subscriber.refresh)
            assert all(tensor.device == SECOND for tensor in model.buffers())
            assert all(torch.equal(model.get_buffer(name), each) for name, each in tensors(3, SECOND).items())


def test_a_step_on_the_second_gpu_gives_the_weights_of_one_on_the_first() -> None:
    packed = batch(groups=1, completion_lengths=[3, 9, 5], prompt_length=4, advantages=np.linspace(-1, 1, 29))
    packed = msgspec.structs.replace(packed, tokens=packed.tokens % 11)

    def trained(device: torch.device) -> torch.Tensor:
        model = TinyModel().to(device)
        TorchTrainer(model, optimizer=partial(torch.optim.SGD, lr=1e-2)).step(packed)
        return torch.cat([tensor.detach().cpu().flatten() for tensor in model.parameters()])

    assert far(trained(SECOND), trained(FIRST)) < 1e-5


async def test_a_sampler_on_the_second_gpu_follows_a_trainer_on_the_first() -> None:
    model = TinyModel().to(FIRST)
    async with WeightPublisher(model) as publisher:
        await publisher.publish(model.state_dict(), 1)
        policy = TorchPolicy(lambda: TinyModel().to(SECOND), EOS, weights=publisher.url)
        async with policy.open(Worker()) as engine:
            (sampled,) = await engine.generate(PROMPTS[:1], SamplingParams(max_completion_tokens=4, greedy=True))

    assert min(sampled.policy_versions) == 1
