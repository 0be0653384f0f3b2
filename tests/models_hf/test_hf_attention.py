"""The attention of an HFModel makes the numbers of transformers without a mask of all tokens by all tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.cells import cells
from tests.models_hf.packed import logits_of_transformers, packed_rows
from tests.stages.training.no_tensor_of import NoTensorOf
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func as boxed
from torch._functorch.partitioners import min_cut_rematerialization_partition

from penstock.models import HFModel
from penstock.torch import Attention, positions_of

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma 3"]

ModelFolder = Callable[[str], Path]

LONG = [torch.arange(n) * 7 % 300 for n in (300, 180, 100)]
"""Longer than two blocks of the windows of 4 tokens."""

ROWS = {"alone": [LONG[:1], LONG[1:2]], "packed": [LONG[:1], LONG[1:]]}


@pytest.fixture(params=[None, 1000], ids=["one mask", "blocks of queries"])
def largest_mask(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound masks to so many elements, so that rows of some hundred tokens are as long ones."""
    if request.param is not None:
        monkeypatch.setattr("penstock._stages.models.hf_attention.LARGEST_MASK", request.param)


@pytest.mark.usefixtures("largest_mask", "one_thread")
@pytest.mark.parametrize("rows", cells(ROWS, run=["packed"]))
@pytest.mark.parametrize("family", cells(FAMILIES, run=["qwen3", "gemma 3"]))
def test_long_rows_have_the_logits_and_gradients_of_transformers(
    family: str, rows: str, model_folder: ModelFolder
) -> None:
    model = HFModel.from_pretrained(model_folder(family))
    expected: Any = transformers.AutoModelForCausalLM.from_pretrained(model_folder(family), dtype=torch.float32)
    tokens, positions, attend = packed_rows(*ROWS[rows])

    logits = model(tokens, positions=positions, attend=attend)
    each = [expected(sequence[None], use_cache=False).logits[0] for row in ROWS[rows] for sequence in row]
    for found in (logits[attend.sequences >= 0], torch.cat(each)):
        torch.autograd.backward(found.logsumexp(-1).mean())

    torch.testing.assert_close(logits[attend.sequences >= 0], torch.cat(each), atol=2e-6, rtol=0)
    for mine, theirs in zip(model.module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=2e-6, rtol=0)


WINDOWED: dict[str, dict[str, Any]] = {
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "use_sliding_window": True, "max_window_layers": 0, "moe_intermediate_size": 16},
    "doge": {},
    "mistral": {},
    "phi3": {},
    "starcoder2": {},
}
"""Families with a sliding window: layers of the first ones do not pass it, and their masks alone have it."""


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", WINDOWED)
def test_a_sliding_window_that_only_a_mask_knows_is_kept(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config: Any = transformers.AutoConfig.for_model(
        family,
        **WINDOWED[family],
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=4,
        pad_token_id=0,
    )
    made: Any = transformers.AutoModelForCausalLM
    made.from_config(config).save_pretrained(tmp_path)
    model = HFModel.from_pretrained(tmp_path)
    sequences = [torch.arange(1, n) * 7 % 64 for n in (30, 12)]
    tokens, positions, attend = packed_rows(sequences)

    logits = model(tokens, positions=positions, attend=attend)[0]

    expected = torch.cat([logits_of_transformers(tmp_path, each) for each in sequences])
    torch.testing.assert_close(logits, expected, atol=2e-6, rtol=0)


@pytest.mark.usefixtures("largest_mask", "one_thread")
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma 3"])
@torch.inference_mode()
def test_turns_behind_a_cache_have_the_logits_of_transformers(family: str, model_folder: ModelFolder) -> None:
    model = HFModel.from_pretrained(model_folder(family))
    first, second = (logits_of_transformers(model_folder(family), sequence) for sequence in LONG[:2])
    real = torch.ones(2, 160, dtype=torch.bool)
    real[1, :60] = False
    cache, at = model.new_cache(2, 300), [0, 0]

    for turn in (160, 20, 1, 1, 20):
        real = real if turn == 160 else torch.nn.functional.pad(real, (0, turn), value=True)
        padding = [int((~each[-turn:]).sum()) for each in real]
        parts = [sequence[begin : begin + turn - pad] for sequence, begin, pad in zip(LONG, at, padding, strict=False)]
        tokens = torch.stack([torch.nn.functional.pad(each, (turn - len(each), 0)) for each in parts])
        at = [begin + len(part) for begin, part in zip(at, parts, strict=True)]
        positions = positions_of(real)[:, -turn:]

        logits = model(tokens, positions=positions, attend=Attention.causal(real, turn), cache=cache)[:, -1]

        torch.testing.assert_close(logits, torch.stack([first[at[0] - 1], second[at[1] - 1]]), atol=2e-6, rtol=0)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}], ids=["stored", "checkpointed"])
@pytest.mark.parametrize("rows", [[torch.arange(1024) % 300], [LONG[0]] * 3], ids=["alone", "packed"])
@pytest.mark.parametrize("family", cells(["llama", "mistral", "gemma 3"], run=["gemma 3"]))
def test_beyond_the_bound_no_tensor_has_the_size_of_a_dense_mask(
    family: str, rows: list[Tensor], options: dict[str, Any], model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock._stages.models.hf_attention.LARGEST_MASK", 1 << 17)
    model = HFModel.from_pretrained(model_folder(family), **options).train()
    tokens, positions, attend = packed_rows(rows)

    with NoTensorOf(tokens.shape[1] ** 2 // 2):
        torch.autograd.backward(model(tokens, positions=positions, attend=attend).logsumexp(-1).sum())


@pytest.mark.usefixtures("one_thread")
@torch.inference_mode()
def test_beyond_the_bound_padded_prompts_are_read_without_a_dense_mask(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock._stages.models.hf_attention.LARGEST_MASK", 1 << 17)
    model = HFModel.from_pretrained(model_folder("gemma 3"))
    real = torch.arange(1024) >= torch.tensor([[0], [100]])

    with NoTensorOf(1 << 20):
        model(
            torch.zeros(2, 1024, dtype=torch.int64),
            positions=positions_of(real),
            attend=Attention.causal(real),
            cache=model.new_cache(2, 1030),
        )


@pytest.mark.long  # tracing takes 10 s
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma 3"])
def test_a_compiled_model_makes_no_dense_mask_either(family: str, model_folder: ModelFolder) -> None:
    largest = []

    def measured(graph: Any, _: Any) -> Any:
        values = [node.meta.get("val") for node in graph.graph.nodes]
        largest.append(max(value.numel() for value in values if isinstance(value, Tensor)))
        return boxed(graph.forward)

    backend = aot_autograd(fw_compiler=measured, partition_fn=min_cut_rematerialization_partition)
    model = HFModel.from_pretrained(model_folder(family))
    compiled = torch.compile(model, dynamic=False, fullgraph=True, backend=backend)
    tokens, positions, attend = packed_rows([torch.arange(1024) % 300])

    logits = compiled(tokens, positions=positions, attend=attend)
    torch.autograd.backward(logits.logsumexp(-1).sum())

    assert len(largest) == 2  # the forward and the backward pass
    assert max(largest) < 1024**2 // 2
    with torch.no_grad():
        torch.testing.assert_close(logits, model(tokens, positions=positions, attend=attend), atol=2e-6, rtol=0)
