"""The dtypes of what does not train in a configured run follow from the device, and from the configuration."""

from __future__ import annotations

from typing import Any

import pytest

from penstock._stages.training_run.dtypes import base_dtype, reference_dtype, sampled_dtype
from penstock.runs import RunConfig, load_run_config

IN_BFLOAT16 = {"precision": "bfloat16"}


def config(**sections: Any) -> RunConfig:
    rest = {"data": {"path": "rows.jsonl"}, "reward": {}}
    return load_run_config({**rest, **sections, "model": {"path": "model", **sections.get("model", {})}})


@pytest.mark.parametrize(
    ("model", "kind", "dtype"),
    [
        ({}, "cuda", "float32"),
        ({"precision": "bfloat16"}, "cuda", "bfloat16"),
        ({"precision": "float16"}, "cuda", "float32"),
        ({}, "cpu", "float32"),
        ({"precision": "bfloat16"}, "cpu", "float32"),
        ({"base_dtype": "float32"}, "cuda", "float32"),
        ({"base_dtype": "bfloat16"}, "cpu", "bfloat16"),
    ],
)
def test_what_does_not_train_is_bfloat16_in_a_run_that_trains_in_it_on_a_cuda_device(
    model: dict[str, Any], kind: str, dtype: str
) -> None:
    given = config(model=model)

    assert (base_dtype(given, kind), reference_dtype(given, kind), sampled_dtype(given, kind)) == (dtype, dtype, dtype)


def test_a_reference_that_moves_is_float32_so_that_small_steps_are_kept() -> None:
    moving = config(model=IN_BFLOAT16, algorithm={"kl": 0.1, "reference": {"share": 0.01}})

    assert reference_dtype(moving, "cuda") == "float32"
    assert sampled_dtype(moving, "cuda") == "bfloat16"


@pytest.mark.parametrize(
    ("placement", "trains", "dtype"),
    [
        ({"sampler_device": "cpu"}, "cuda", "float32"),
        ({"sampler_device": "cuda:1"}, "cpu", "bfloat16"),
        ({"ray": {"num_gpus": 1}}, "cpu", "bfloat16"),
        ({"ray": {}}, "cuda", "float32"),
        ({"joining": {}}, "cuda", "float32"),
        ({"joining": {}, "sampler_device": "cuda"}, "cuda", "bfloat16"),
    ],
)
def test_a_sampler_has_the_dtype_of_the_device_that_samples(placement: dict[str, Any], trains: str, dtype: str) -> None:
    assert sampled_dtype(config(model=IN_BFLOAT16, placement=placement), trains) == dtype
