"""Every way to compute a model on a GPU, beside float32 on a CPU; the suite does the same on a CPU.

See tests/kernel_paths.py. `against_gpu_kernels` names the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from benchmarks.training import without_kernels
from tests.kernel_paths import ROWS, WAYS, check_gradients, check_head, check_packed_rows
from tests.models_hf.conftest import write_model
from tests.models_hf.packed import packed_rows
from torch.profiler import ProfilerActivity, profile

from penstock.models import HFModel

CUDA = torch.device("cuda")

ModelFolder = Callable[[str], Path]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """Return the function that returns the folder of a family."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family.replace(" ", ""))
            write_model(family, made[family])
        return made[family]

    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_head_has_the_numbers_of_float64(dtype: torch.dtype) -> None:
    check_head(CUDA, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gemma 3"])
def test_packed_rows_have_the_logits_of_each_sequence_alone_and_of_masks(
    family: str, dtype: torch.dtype, model_folder: ModelFolder
) -> None:
    check_packed_rows(model_folder(family), CUDA, dtype, without_kernels)


@pytest.mark.parametrize("family", ["mistral", "gemma 3"])
def test_a_window_is_computed_by_the_kernel_for_sequences_of_different_lengths(
    family: str, model_folder: ModelFolder
) -> None:
    model = HFModel.from_pretrained(model_folder(family), device=CUDA)
    tokens, positions, attend = packed_rows(*ROWS)
    assert attend.cu_seqlens is not None
    there = attend._replace(sequences=attend.sequences.to(CUDA), cu_seqlens=attend.cu_seqlens.to(CUDA))

    with (
        profile(activities=[ProfilerActivity.CPU]) as profiled,
        torch.no_grad(),
        torch.autocast("cuda", torch.bfloat16),
    ):
        model(tokens.to(CUDA), positions=positions.to(CUDA), attend=there)

    calls = [event.name for event in profiled.events() or []]
    assert sum("_varlen_attn" in name for name in calls) >= model.module.config.num_hidden_layers
    assert not any("scaled_dot_product" in name for name in calls)


@pytest.mark.parametrize("way", WAYS)
def test_each_way_has_the_gradients_of_float32_on_a_cpu(way: str, model_folder: ModelFolder) -> None:
    check_gradients(model_folder("qwen2"), CUDA, way)


@pytest.mark.parametrize("way", ["float32", "bfloat16"])
def test_a_compiled_step_has_the_gradients_of_float32_on_a_cpu(way: str, model_folder: ModelFolder) -> None:
    check_gradients(model_folder("qwen2"), CUDA, way, compile=partial(torch.compile, dynamic=True))
