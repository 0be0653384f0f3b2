"""The attention of packed rows: by the kernel for sequences of different lengths where it computes, else by a mask."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.as_on_cuda import as_on_cuda, operators_on_cuda
from tests.models_hf.packed import packed_rows
from torch import Tensor

from penstock._stages.contracts import varlen
from penstock._stages.contracts.varlen import computes, is_for, sequences_of
from penstock._stages.models import hf_attention
from penstock.torch import Attention

CUDA, CPU = torch.device("cuda"), torch.device("cpu")

NARROW = torch.bfloat16

SEQUENCES = torch.tensor([[0, 0, 0, 1, 1, -1], [2, 2, 2, 2, 2, 2]])

STARTS = torch.tensor([0, 3, 5, 6, 12], dtype=torch.int32)


def heads(width: int = 8, count: int = 4, keys: int = 2, dtype: torch.dtype = NARROW) -> list[Tensor]:
    """Return queries, keys and values of two rows of six tokens, which keep gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, number, 6, width) for number in (count, keys, keys)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "chosen"),
    [
        (CUDA, NARROW, (9, 0), True),
        (CUDA, torch.float16, (8, 0), True),
        (CUDA, NARROW, (7, 5), False),
        (CUDA, torch.float32, (9, 0), False),
        (CPU, NARROW, (9, 0), False),
    ],
)
def test_the_kernel_is_for_cuda_devices_that_compute_in_sixteen_bits(
    monkeypatch: pytest.MonkeyPatch, *, device: Any, dtype: torch.dtype, capability: Any, chosen: bool
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
    monkeypatch.setattr(varlen, "_kernels", {})

    assert is_for(device, dtype) == chosen


def test_a_torch_without_the_kernel_keeps_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(varlen, "_kernels", {})
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)

    assert not is_for(CUDA, NARROW)


@pytest.mark.parametrize(
    ("shapes", "dropout", "fits"),
    [
        ([(2, 4, 6, 64)] * 3, 0.0, True),
        ([(2, 4, 6, 64), (2, 2, 6, 64), (2, 2, 6, 64)], 0.0, True),
        ([(2, 4, 6, 256)] * 3, 0.0, True),
        ([(2, 4, 6, 264)] * 3, 0.0, False),
        ([(2, 4, 6, 12)] * 3, 0.0, False),
        ([(2, 4, 6, 64), (2, 4, 6, 64), (2, 4, 6, 32)], 0.0, False),
        ([(2, 4, 1, 64), (2, 4, 6, 64), (2, 4, 6, 64)], 0.0, False),
        ([(2, 4, 6, 64)] * 3, 0.1, False),
    ],
    ids=["equal", "grouped", "widest", "too wide", "no multiple", "other values", "cached", "dropout"],
)
def test_the_kernel_computes_heads_that_fit(shapes: Any, dropout: float, *, fits: bool) -> None:
    query, key, value = (torch.empty(shape) for shape in shapes)

    assert computes(query, key, value, dropout) == fits


def test_attention_by_the_starts_of_sequences_is_that_by_the_mask() -> None:
    with as_on_cuda() as calls:
        seen = Attention.packed(SEQUENCES, cu_seqlens=STARTS).over(*(given := heads()))
        torch.autograd.backward(seen.float().square().sum())
    expected = Attention.packed(SEQUENCES).over(*(exact := heads(dtype=torch.float32)))
    torch.autograd.backward(expected.square().sum())

    assert calls == {"varlen_attn": 1}
    assert seen.dtype == NARROW
    torch.testing.assert_close(seen.float(), expected, atol=0.02, rtol=0.02)
    for one, other in zip(given, exact, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad.float(), other.grad, atol=0.1, rtol=0.05)


@pytest.mark.parametrize(
    ("attend", "given"),
    [
        (Attention.packed(SEQUENCES), heads()),
        (Attention.packed(SEQUENCES, cu_seqlens=STARTS), heads(dtype=torch.float32)),
        (Attention.packed(SEQUENCES, cu_seqlens=STARTS), heads(width=12)),
        (Attention.packed(torch.zeros(2, 6), cu_seqlens=STARTS, one_sequence=True), heads()),
        (Attention.causal(torch.ones(2, 6, dtype=torch.bool)), heads()),
    ],
    ids=["no starts", "float32", "a width of 12", "rows of one sequence", "padded rows"],
)
def test_other_calls_keep_the_attention_of_a_cpu(attend: Attention, given: list[Tensor]) -> None:
    with as_on_cuda() as calls:
        seen = attend.over(*given)

    assert not calls
    assert torch.equal(seen, attend.over(*given))


def test_other_attention_of_a_cuda_device_is_not_planned_by_cudnn_for_each_length() -> None:
    def allowed() -> tuple[bool, bool, bool]:
        cuda: Any = torch.backends.cuda
        return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()

    before = allowed()
    with varlen.any_length(CUDA):
        assert allowed() == (True, True, False)
    with varlen.any_length(CPU):
        assert allowed() == before
    assert allowed() == before


def test_the_sequence_of_each_token_follows_from_the_starts() -> None:
    assert sequences_of(STARTS, 2, 6).tolist() == [[0, 0, 0, 1, 1, 2], [3] * 6]


@pytest.mark.parametrize("window", [None, 3], ids=["all keys", "a window"])
@pytest.mark.parametrize("dtype", [NARROW, torch.float16, torch.float32], ids=str)
def test_a_cuda_device_is_given_torchs_own_operator(
    dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(varlen, "_kernels", {})

    with operators_on_cuda() as operators:
        query = torch.empty(2, 4, 6, 64, dtype=dtype, device="cuda")
        key = torch.empty(2, 2, 6, 64, dtype=dtype, device="cuda")
        starts = torch.empty(5, dtype=torch.int32, device="cuda")
        seen = varlen.varlen(query, key, key, starts, dtype=NARROW, window=window)

    assert "torch_attn._varlen_attn.default" in operators
    assert (seen.shape, seen.dtype) == ((2, 6, 4, 64), NARROW)


ROWS = [[torch.arange(30)], [torch.arange(18), torch.arange(10)]]


@pytest.mark.parametrize(
    ("dtype", "window", "torch_has_it", "alone", "kernel"),
    [
        (NARROW, None, True, False, "varlen_attn"),
        (torch.float16, None, True, False, "varlen_attn"),
        (NARROW, 4, True, False, "varlen_attn, window"),
        (NARROW, 100, True, False, "varlen_attn"),
        (NARROW, 4, True, True, "varlen_attn, window"),
        (NARROW, None, True, True, "sdpa"),
        (NARROW, None, False, False, "sdpa with a mask"),
        (NARROW, 4, False, True, "sdpa with a mask"),
        (torch.float32, None, True, False, "sdpa with a mask"),
        (torch.float32, 4, True, False, "sdpa with a mask"),
        (torch.float32, None, True, True, "sdpa"),
    ],
)
def test_the_kernel_of_a_layer_follows_from_dtype_window_rows_and_torch(
    *, dtype: torch.dtype, window: int | None, torch_has_it: bool, alone: bool, kernel: str
) -> None:
    _, _, attend = packed_rows(*(row[:1] if alone else row for row in ROWS))
    query = torch.zeros(2, 4, attend.tokens, 8, dtype=dtype)

    with as_on_cuda() as calls, nullcontext() if torch_has_it else patch.object(varlen, "_kernel_on", lambda _: None):

        def sdpa(_: Any, query: Tensor, *rest: Tensor | None) -> tuple[Tensor, None]:
            calls["sdpa" if rest[-1] is None else "sdpa with a mask"] += 1
            return query.transpose(1, 2), None

        sight = hf_attention.sight(attend, dtype, window)
        hf_attention.attention(sdpa, None, query, query, query, sight, sliding_window=window)

    assert calls == {kernel: 1}
    assert attend.cu_seqlens is not None
    assert (sight.numel() == len(attend.cu_seqlens)) == kernel.startswith("varlen")  # else a mask, or nothing
