"""Every way to compute a model, on a CPU, with its own kernels and with those of a CUDA device, pretended."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from benchmarks.training import without_kernels
from tests.as_on_cuda import as_on_cuda
from tests.kernel_paths import WAYS, check_gradients, check_head, check_packed_rows

ModelFolder = Callable[[str], Path]

Kernels = Callable[[], AbstractContextManager[object]]

KERNELS: dict[str, Kernels] = {"own": nullcontext, "pretended": as_on_cuda}

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.parametrize("kernels", KERNELS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_has_the_numbers_of_float64(kernels: str, dtype: torch.dtype) -> None:
    with KERNELS[kernels]():
        check_head("cpu", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma 3"])
def test_packed_rows_have_the_logits_of_each_sequence_alone(
    kernels: str, family: str, dtype: torch.dtype, model_folder: ModelFolder
) -> None:
    with KERNELS[kernels]():
        check_packed_rows(model_folder(family), "cpu", dtype, without_kernels)


@pytest.mark.parametrize("way", WAYS)
def test_each_way_has_the_gradients_of_float32(kernels: str, way: str, model_folder: ModelFolder) -> None:
    with KERNELS[kernels]():
        check_gradients(model_folder("qwen2"), "cpu", way)


@pytest.mark.long  # it compiles for a minute
def test_a_compiled_step_has_the_gradients_of_one_that_is_not(kernels: str, model_folder: ModelFolder) -> None:
    traced = partial(torch.compile, dynamic=True, backend="aot_eager")

    with KERNELS[kernels]():
        check_gradients(model_folder("qwen2"), "cpu", "float32", compile=traced)
