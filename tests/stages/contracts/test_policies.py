import inspect
import pickle
from functools import partial

import numpy as np
import pytest
from tests.fake_policy import FakePolicy
from tests.tiny_model import TinyModel

from penstock import Worker
from penstock.policies import Engine, GenerationIsOutside, NoOpEngine, NoOpPolicy, Policy, SamplingParams
from penstock.torch import TorchPolicy

METHODS = {name for name in vars(Engine) if not name.startswith("_")}


async def test_a_policy_without_generation_refuses_to_sample_with_the_remedy() -> None:
    policy: Policy = NoOpPolicy()

    async with policy.open(Worker()) as engine:
        with pytest.raises(GenerationIsOutside, match=r"got 2 prompts: use an environment with a `rollout` method"):
            await engine.generate([np.array([1], np.int32)] * 2, SamplingParams(max_completion_tokens=4))


async def test_an_engine_without_generation_accepts_every_other_call() -> None:
    engine: Engine = NoOpEngine()

    await engine.pause()
    await engine.update_weights("file:///weights", 3)
    await engine.resume()
    await engine.sleep()
    await engine.wake_up()


def test_a_policy_without_generation_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(NoOpPolicy())) == NoOpPolicy()  # noqa: S301 (our own bytes)


def assert_methods(engine: object) -> None:
    """Assert that `engine` has every method with the parameters of the protocol, and no catch-all."""
    for name in METHODS:
        assert inspect.iscoroutinefunction(getattr(engine, name))
        assert list(inspect.signature(getattr(engine, name)).parameters) == list(
            inspect.signature(partial(getattr(Engine, name), engine)).parameters
        )
    assert not hasattr(engine, "__getattr__")


@pytest.mark.parametrize("engine", [NoOpEngine(), FakePolicy()])
def test_an_engine_has_the_methods_of_the_protocol(engine: Engine) -> None:
    assert_methods(engine)


async def test_the_engine_of_a_torch_policy_has_the_methods_of_the_protocol() -> None:
    async with TorchPolicy(TinyModel, eos_id=3).open(Worker()) as engine:
        assert_methods(engine)
