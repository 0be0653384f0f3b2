"""The measurements of `python -m benchmarks.gpu` on a GPU, with models that take no time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.gpu.cases import CASES, Load
from benchmarks.gpu.devices import Device
from benchmarks.gpu.serving import measure_publication, measure_sampling
from benchmarks.gpu.step import measure_step
from tests.configured_run import PRECISIONS, check_precision

GPU = Device.of("cuda")

SMALL = Load(1024, shortest=16, longest=64, rows=4, prompt=8, completion=8, repeats=2)


@pytest.mark.parametrize("case", ["tiny", "tiny-adapters"])
def test_a_step_has_kernels_of_every_group_and_their_time_is_below_its_own(case: str) -> None:
    found = measure_step(CASES[case], SMALL, GPU)

    groups = found["kernels"].values()
    assert all(group["count"] > 0 and group["ms"] > 0 for group in groups)
    assert sum(group["ms"] for group in groups) < 2000 * max(found["step_s"])
    assert found["peak_gb"] > 0
    assert (found["share"] is None) == (GPU.sheet is None)


def test_the_kernels_of_a_product_are_counted_once() -> None:
    left = torch.randn(256, 256, device=GPU.torch)

    def products() -> None:
        with torch.profiler.record_function("a range"):
            for _ in range(3):
                torch.mm(left, left)

    GPU.kernels(products)
    kernels = GPU.kernels(products)

    of_products = [kernel for kernel in kernels if "aten::mm" in kernel.ranges]
    assert len(of_products) in {3, 6}  # some shapes have a second kernel, which adds parts of sums
    assert all(kernel.ranges[-1] == "a range" for kernel in of_products)
    assert all(kernel.name != "a range" for kernel in kernels)


def test_a_version_is_published_to_the_host_and_to_the_gpu() -> None:
    found = measure_publication(CASES["tiny"], SMALL, GPU)

    assert list(found["publish_s"]) == ["host", "device"]


def test_samples_are_counted_beside_the_bandwidth_of_the_memory() -> None:
    found: dict[str, Any] = measure_sampling(CASES["tiny"], SMALL, GPU)

    assert found["tokens"] == 32
    assert found["share"] is None or 0 < found["share"] < 1


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_run_of_these_dtypes_trains_on_samples_that_its_trainer_finds_likely(name: str, tmp_path: Any) -> None:
    check_precision(tmp_path, name, "cuda")
