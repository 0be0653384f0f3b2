"""SkyRL's sampling parameters become penstock's, and none is ignored that means something."""

from __future__ import annotations

import pytest
from tests.skyrl.contract import VLLM_PARAMETERS

from penstock._stages.integrations.skyrl.sampling_params import sampling_of
from penstock.errors import InvalidConfig
from penstock.policies import SamplingParams


def test_the_defaults_of_skyrl_are_those_of_penstock_but_for_the_length() -> None:
    assert sampling_of(VLLM_PARAMETERS) == SamplingParams(max_completion_tokens=1024)


def test_every_parameter_that_means_something_is_kept() -> None:
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "stop": ["\n"], "seed": 3}

    assert sampling_of({**given, "repetition_penalty": 1.1, "max_tokens": 7}) == SamplingParams(
        max_completion_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.1,
        stop=("\n",),
        seed=3,
    )


def test_temperature_0_is_greedy() -> None:
    assert sampling_of({"temperature": 0.0}) == SamplingParams(greedy=True)


@pytest.mark.parametrize("given", [{"min_tokens": 5}, {"presence_penalty": 0.5}])
def test_a_parameter_that_penstock_does_not_have_is_refused(given: dict[str, float]) -> None:
    with pytest.raises(InvalidConfig, match=f"{next(iter(given))}={next(iter(given.values()))}"):
        sampling_of(given)
