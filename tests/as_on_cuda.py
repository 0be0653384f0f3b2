"""The kernels of a CUDA device, pretended on a CPU: their results by other means, and how often each was called.

Tensors without memory show the operators themselves that a CUDA device would be given (`operators_on_cuda`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from penstock._stages.contracts import varlen

_mm, _addmm = torch.mm, torch.addmm


@contextmanager
def as_on_cuda() -> Iterator[Counter[str]]:
    """Choose kernels within the body as a CUDA device does, and yield the number of calls of each by its name."""
    calls = Counter[str]()

    def mm(left: Tensor, right: Tensor, **options: Any) -> Tensor:
        if "out_dtype" not in options:
            return _mm(left, right, **options)
        calls["mm.dtype"] += 1
        dtype, out = options["out_dtype"], options.get("out")
        return _mm(left.to(dtype), right.to(dtype), out=out)

    def addmm(total: Tensor, left: Tensor, right: Tensor, **options: Any) -> Tensor:
        if "out_dtype" not in options:
            return _addmm(total, left, right, **options)
        calls["addmm.dtype"] += 1
        assert total.dtype == options["out_dtype"]
        return _addmm(total, left.float(), right.float(), out=options["out"])

    def varlen_attn(*arguments: Any, scale: float | None, window_size: tuple[int, int]) -> Tensor:
        calls["varlen_attn" if window_size == (-1, 0) else "varlen_attn, window"] += 1
        return _varlen(*arguments, scale=scale, window_size=window_size)

    with (
        patch("penstock._stages.losses.products.sums_in_float32", lambda _: True),
        patch("penstock._stages.contracts.varlen._kernel_on", lambda _: varlen_attn),
        patch("torch.mm", mm),
        patch("torch.addmm", addmm),
    ):
        yield calls


def _varlen(*arguments: Any, scale: float | None, window_size: tuple[int, int]) -> Tensor:
    """Return the causal attention [N, H, D] within each sequence, one after the other; see `varlen_attn`."""
    before, after = window_size
    assert after == 0
    query, key, value, starts, ends, longest, _ = arguments
    assert {query.dtype, key.dtype, value.dtype} <= varlen.DTYPES
    assert starts.dtype == torch.int32
    assert starts is ends
    assert int(starts.diff().max()) <= longest
    assert int(starts[-1]) == len(query)
    lengths = starts.diff().tolist()
    parts = zip(*(each.transpose(0, 1).split(lengths, dim=1) for each in (query, key, value)), strict=True)
    seen = [
        scaled_dot_product_attention(
            one, other, last, _band(one.shape[1], before).to(one.device), scale=scale, enable_gqa=True
        )
        for one, other, last in parts
    ]
    return torch.cat(seen, dim=1).transpose(0, 1)


def _band(tokens: int, before: int) -> Tensor:
    """Return [tokens, tokens] true on the keys that each query sees: itself and `before` others; −1 for all."""
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    return (distance >= 0) & (distance <= (tokens if before < 0 else before))


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Records the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


@contextmanager
def operators_on_cuda() -> Iterator[set[str]]:
    """Give tensors of the body no memory, so that they may be on `cuda`; yield the operators that are called."""
    with FakeTensorMode(), Operators() as operators, torch.no_grad():
        yield operators.names
