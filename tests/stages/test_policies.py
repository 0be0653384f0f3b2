import pickle

import numpy as np
import pytest

from penstock.pipeline.context import Worker
from penstock.stages.policies import GenerationIsOutside, NoOpPolicy, Policy


async def test_a_policy_without_generation_refuses_to_sample_and_says_what_to_do() -> None:
    policy: Policy = NoOpPolicy()

    async with policy.open(Worker()) as engine:
        with pytest.raises(GenerationIsOutside, match=r"got 2 prompts: use an environment with a `rollout` method"):
            await engine.generate([np.array([1], np.int32)] * 2, max_tokens=4)


def test_a_policy_without_generation_travels_to_workers() -> None:
    assert pickle.loads(pickle.dumps(NoOpPolicy())) == NoOpPolicy()  # noqa: S301 (our own bytes)
