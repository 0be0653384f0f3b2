import inspect
import pickle

import numpy as np
import pytest
from tests.fake_policy import FakePolicy

from penstock import Worker
from penstock._stages.engines.http_engine import HttpEngine
from penstock._stages.engines.torch_engine import TorchEngine
from penstock.policies import Engine, GenerationIsOutside, NoOpEngine, NoOpPolicy, Policy

LISTED = {"generate", "update_weights", "pause", "resume", "sleep", "wake_up"}


async def test_a_policy_without_generation_refuses_to_sample_and_says_what_to_do() -> None:
    policy: Policy = NoOpPolicy()

    async with policy.open(Worker()) as engine:
        with pytest.raises(GenerationIsOutside, match=r"got 2 prompts: use an environment with a `rollout` method"):
            await engine.generate([np.array([1], np.int32)] * 2, max_completion_tokens=4)


async def test_an_engine_without_generation_lets_whoever_trains_say_what_it_likes() -> None:
    engine: Engine = NoOpEngine()

    await engine.pause()
    await engine.update_weights("file:///weights", 3)
    await engine.resume()
    await engine.sleep()
    await engine.wake_up()


def test_a_policy_without_generation_travels_to_workers() -> None:
    assert pickle.loads(pickle.dumps(NoOpPolicy())) == NoOpPolicy()  # noqa: S301 (our own bytes)


def test_the_protocol_lists_all_that_can_be_asked_of_an_engine() -> None:
    assert {name for name in vars(Engine) if not name.startswith("_")} == LISTED


@pytest.mark.parametrize("engine", [NoOpEngine, TorchEngine, HttpEngine, FakePolicy])
def test_an_engine_has_every_method_as_the_protocol_has_it_and_answers_to_no_other(engine: type) -> None:
    for name in LISTED:
        assert inspect.iscoroutinefunction(getattr(engine, name))
        assert list(inspect.signature(getattr(engine, name)).parameters) == list(
            inspect.signature(getattr(Engine, name)).parameters
        )
    assert not hasattr(engine, "__getattr__")
