"""CPUs and GPUs are read under the keys of Ray's nodes and of its options."""

from __future__ import annotations

from typing import Any

import pytest

from penstock._stages.integrations.roll.resources import amount_of, check_fit
from penstock.errors import InvalidConfig


@pytest.mark.parametrize(
    ("resources", "cpus", "gpus"),
    [
        ({"CPU": 4.0, "GPU": 1.0, "memory": 9}, 4, 1),
        ({"num_cpus": 4, "num_gpus": 1}, 4, 1),
        ({"CPU": 2, "num_cpus": 2}, 2, 0),
        ({"num_gpus": 0.5}, 0, 0.5),
        ({}, 0, 0),
    ],
)
def test_either_key_is_read_and_none_is_zero(resources: dict[str, Any], cpus: float, gpus: float) -> None:
    assert (amount_of(resources, "CPU"), amount_of(resources, "GPU")) == (cpus, gpus)


def test_keys_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"resources: expected one of CPU and num_cpus, or the same amount"):
        amount_of({"CPU": 2, "num_cpus": 4}, "CPU")


@pytest.mark.parametrize("amount", [-1, "4", None, True, float("nan")])
def test_an_amount_that_is_no_number_of_at_least_0_is_refused(amount: Any) -> None:
    with pytest.raises(InvalidConfig, match=r"resources\.num_cpus: expected a number of at least 0"):
        amount_of({"num_cpus": amount}, "CPU")


def test_more_than_the_node_has_is_refused_whichever_keys_it_has() -> None:
    check_fit({"num_cpus": 4}, {"CPU": 4.0}, "here")

    with pytest.raises(InvalidConfig, match=r"here\.num_cpus: expected at most 4, the CPUs of Ray's node, got 5"):
        check_fit({"num_cpus": 5}, {"CPU": 4.0}, "here")
    with pytest.raises(InvalidConfig, match=r"here\.GPU: expected at most 0"):
        check_fit({"GPU": 1}, {"num_cpus": 8}, "here")
