"""FlashAttention 3's function over packed segments, computed by torch on a CPU: what TRL takes from a GPU's kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def flash_attn_varlen_func(  # noqa: PLR0917 (the kernel's)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: Any,  # noqa: ARG001 (of a kernel)
    longest_k: Any,  # noqa: ARG001
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Return [N, H, D] the attention of each segment's queries to its keys, which end with the segment itself."""
    assert causal
    assert window_size == (-1, -1)
    parts = []
    bounds = zip(
        starts_q.tolist()[:-1], starts_q.tolist()[1:], starts_k.tolist()[:-1], starts_k.tolist()[1:], strict=True
    )
    for a, b, c, d in bounds:
        if a == b:
            continue
        q, k, v = (each.transpose(0, 1)[None] for each in (query[a:b], key[c:d], value[c:d]))
        seen = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=softmax_scale, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)
