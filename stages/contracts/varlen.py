"""The kernels of attention on a CUDA device: that for sequences of different lengths, and those behind the others.

`varlen_attn` of torch is a flash attention over packed rows as one, with the start of each sequence: it makes no mask,
and computes no scores between sequences. It needs a CUDA device that computes in bfloat16, queries in a dtype of 16
bits, and heads that fit; `is_for` and `computes` decide, and every other call keeps `scaled_dot_product_attention`,
within `any_length`. Knows no model.

Axes: B rows, T tokens, H heads, D width of a head, K sequences and paddings.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from inspect import signature
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Kernel: TypeAlias = Callable[..., Any]

DTYPES = {torch.bfloat16, torch.float16}

WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

OLDEST_DEVICE = 8, 0
"""Compute capability of the first devices that run the kernel."""

WIDEST_HEAD, MULTIPLE = 256, 8
"""Bounds on the width of a head."""


def computes(query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0) -> bool:
    """Return whether the kernel computes the attention of these heads [B, heads, T, D], before a cast by autocast."""
    width, values = query.shape[-1], value.shape[-1]
    same_tokens = query.shape[2] == key.shape[2]
    return same_tokens and not dropout and width == values and width <= WIDEST_HEAD and width % MULTIPLE == 0


def is_for(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether there is a kernel for queries on `device` in `dtype`."""
    return dtype in DTYPES and _kernel_on(device) is not None


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    dtype: torch.dtype,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Return the causal attention [B, T, H, D] of heads [B, heads, T, D] within each sequence, computed in `dtype`.

    A token sees `window` keys, itself included; None for all before it.
    """
    kernel = _kernel_on(query.device)
    if kernel is None:
        raise RuntimeError(f"expected a device with a kernel for sequences of different lengths, got {query.device}")
    rows, heads, tokens, width = query.shape
    before = -1 if window is None else window - 1
    flat = [each.to(dtype).transpose(1, 2).flatten(0, 1) for each in (query, key, value)]
    seen: Tensor = kernel(*flat, cu_seqlens, cu_seqlens, tokens, tokens, scale=scale, window_size=(before, 0))
    return seen.view(rows, tokens, heads, width)


def any_length(device: torch.device) -> AbstractContextManager[object]:
    """Leave out cuDNN within the body. Its attention makes a plan for each new number of keys.

    A sampler has another one with every token: on an H100 a pass of a model of 0.5 billion parameters took 104 ms with
    it, and 28 ms without. Enter it in each layer, because activations may be computed again outside a call.
    """
    return sdpa_kernel(WITHOUT_CUDNN) if device.type == "cuda" else nullcontext()


def sequences_of(cu_seqlens: Tensor, rows: int, tokens: int) -> Tensor:
    """Return [B, T] int64 the sequence, or the padding, of each token of rows."""
    places = torch.arange(rows * tokens, dtype=torch.int32, device=cu_seqlens.device)
    return torch.bucketize(places, cu_seqlens[1:], right=True).view(rows, tokens)


_kernels: dict[int, Kernel | None] = {}
"""Results of `_found_on`, by the index of the device: torch.compile reads it, and could not trace the search."""


def _kernel_on(device: torch.device) -> Kernel | None:
    """Return the kernel for tensors on `device`; None if there is none."""
    if device.type != "cuda":
        return None
    index = device.index or 0
    if index not in _kernels:
        _kernels[index] = _found_on(device)
    return _kernels[index]


def _found_on(device: torch.device) -> Kernel | None:
    """Return the kernel if a CUDA device runs it, and this torch has it in this form."""
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 (imports the compiler; absent before torch 2.10)
    except ImportError:
        return None
    known = signature(varlen_attn).parameters
    old = torch.cuda.get_device_capability(device) < OLDEST_DEVICE
    if "window_size" not in known or torch.version.hip is not None or old:
        return None
    if "enable_gqa" not in known:  # before torch 2.13 heads of queries share keys without being told
        return varlen_attn
    return partial(varlen_attn, enable_gqa=True)
