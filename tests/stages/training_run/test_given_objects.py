"""A mapping may give a configuration its functions as values, wherever a file names them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from penstock import RewardBridge
from penstock.errors import InvalidConfig
from penstock.rewards import RewardFunction, RewardInput
from penstock.runs import RunConfig, load_run_config

PLAIN: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "reward": {}}


def right(completions: list[str], **_: object) -> list[float]:
    return [float(completion == "4") for completion in completions]


def long(completion: RewardInput) -> float:
    return len(completion.text)


def rewarded(function: Any, **options: Any) -> RunConfig:
    return load_run_config(PLAIN | {"reward": {"functions": [{"function": function, **options}]}})


def weighted(weight: float) -> Callable[..., list[float]]:
    def reward(completions: list[str], **_: object) -> list[float]:
        return [weight * value for value in right(completions)]

    return reward


def called(config: RunConfig) -> Any:
    (component,) = RewardBridge(config.reward).components
    return component


def test_a_function_of_a_module_is_named_as_a_file_would_name_it() -> None:
    config = rewarded(right)

    assert config == rewarded(f"{__name__}:right")
    assert config.reward.functions[0].function == f"{__name__}:right"


@pytest.mark.parametrize("function", [lambda completions, **_: [1.0] * len(completions), weighted(2), partial(right)])
def test_a_function_without_a_name_of_its_own_is_found_by_the_one_that_it_gets(function: Any) -> None:
    assert called(rewarded(function, name="given")).name == "given"


def test_a_function_that_is_defined_again_is_another_one() -> None:
    first, second = weighted(1), weighted(2)

    names = [rewarded(each).reward.functions[0].function for each in (first, second, first)]

    assert names[0] == names[2] != names[1]


def test_a_component_is_given_with_its_options() -> None:
    component = called(rewarded(RewardFunction(long, weight=0.5), name="length"))

    assert (component.name, component.weight) == ("length", 0.5)


def prepare(config: RunConfig) -> None: ...


def test_every_key_that_names_code_takes_it_as_a_value() -> None:
    config = load_run_config(
        PLAIN
        | {
            "algorithm": {"loss": weighted},
            "evaluation": {"sets": [{"path": "e.jsonl"}], "answer": str.strip},
            "trackers": [prepare],
            "prepare": prepare,
        }
    )

    assert config.algorithm.loss == f"{__name__}:weighted"
    assert config.evaluation is not None
    assert config.evaluation.answer == "builtins:str.strip"
    assert config.trackers == (config.prepare,) == (f"{__name__}:prepare",)


@pytest.mark.parametrize("value", [3, ["reward:right"], {}])
def test_a_value_that_is_no_code_is_refused(value: object) -> None:
    with pytest.raises(InvalidConfig, match=r"reward\.functions\[0\]\.function"):
        rewarded(value)
