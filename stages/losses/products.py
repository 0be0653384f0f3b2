"""Products of hidden states and the head: their dtypes, and the kernel that computes them.

A CUDA device multiplies bfloat16 numbers an order of magnitude faster than float32 ones, and sums and returns the
products in float32 (`torch.mm(…, out_dtype=torch.float32)`). Only the inputs are rounded then: to 2⁻⁹ of each number,
where logits in bfloat16 would have three digits. Other devices multiply in the dtype of the weights.

The products of a backward pass alone may be of bfloat16 numbers too, on a processor with instructions for them. It
rounds the product of each tile to bfloat16; tiles are summed in float32.

Axes: T tokens, V vocabulary, D width of the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ..._pipeline.errors import InvalidConfig

OLDEST = 2, 11
"""The first version of torch with an `addmm` that adds products of bfloat16 to a float32 sum."""


VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def sums_in_float32(kind: str) -> bool:
    """Return whether devices of a type, `cuda` or `cpu`, sum products of bfloat16 in float32, and return them so."""
    return kind == "cuda" and torch.version.hip is None and VERSION >= OLDEST


def dtype_of_inputs(weight: Tensor, autocast: torch.dtype | None) -> torch.dtype:
    """Return the dtype of products of hidden states and `weight`, by the `autocast` around the model.

    float16 is left out: its largest number is 65504, and hidden states may be larger.
    """
    narrow = autocast == torch.bfloat16 and weight.dtype == torch.float32 and sums_in_float32(weight.device.type)
    return torch.bfloat16 if narrow else weight.dtype


def check_backward_dtype(owner: str, dtype: torch.dtype | None, device: torch.device) -> None:
    """Check that products of a backward pass may be of numbers in `dtype`; None for those of the forward pass.

    Raises:
        InvalidConfig: it is another than bfloat16, or `device` computes products of bfloat16 no faster.
    """
    if dtype not in {None, torch.bfloat16}:
        raise InvalidConfig(f"{owner}: expected torch.bfloat16, or None for the dtype of the forward pass, got {dtype}")
    if dtype is not None and not (sums_in_float32(device.type) or (device.type == "cpu" and _cpu_has_bfloat16())):
        raise InvalidConfig(
            f"{owner}: expected a CUDA device, or a processor with instructions for bfloat16 (avx512_bf16, amx_bf16), "
            f"got {device.type} without: leave the dtype out, products of bfloat16 would be slower here"
        )


def _cpu_has_bfloat16() -> bool:
    """Return whether the processor has instructions for products of bfloat16. Every version of torch has the names."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()  # noqa: SLF001 (there is no public name)


def dtype_of_products(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of the products of `hidden`, in the dtype of the inputs, and `weight`."""
    narrow = hidden.dtype == torch.bfloat16
    return torch.float32 if narrow and sums_in_float32(weight.device.type) else weight.dtype


def multiply(left: Tensor, right: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return the product of two matrices of one dtype in `dtype`: theirs, or float32."""
    if left.dtype == dtype:
        return torch.mm(left, right) if out is None else torch.mm(left, right, out=out)
    if not sums_in_float32(left.device.type):
        return multiply(left.to(dtype), right.to(dtype), dtype, out)
    if out is None:
        return torch.mm(left, right, out_dtype=dtype)
    return torch.mm(left, right, out_dtype=dtype, out=out)


def products_of(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Return [T, V] the products of hidden states [T, D] and a weight [V, D] of one dtype in `dtype`, without gradient.

    `out` is memory for them.
    """
    if bias is None or hidden.dtype != dtype:
        products = multiply(hidden, weight.T, dtype, out)
        return products if bias is None else products.add_(bias)
    return torch.addmm(bias, hidden, weight.T) if out is None else torch.addmm(bias, hidden, weight.T, out=out)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of two matrices of one dtype to `total`, of their dtype or float32."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif sums_in_float32(left.device.type):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return [..., V] the products of `hidden` [..., D], in the dtype of the inputs, and the head.

    Their dtype is `dtype_of_products`. With gradient.
    """
    dtype = dtype_of_products(hidden, weight)
    if hidden.dtype == dtype:
        return functional.linear(hidden, weight, bias)
    flat: Tensor = _Linear.apply(hidden.flatten(0, -2), weight, dtype)  # type: ignore[no-untyped-call]
    products = flat.view(*hidden.shape[:-1], -1)
    return products if bias is None else products + bias


class _Linear(torch.autograd.Function):
    """The products [T, V] of hidden states [T, D] and a weight [V, D] in a wider dtype than that of the inputs."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.dtype = dtype
        return multiply(hidden, weight.to(hidden.dtype).T, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] (torch's own decorator)
        hidden, weight = ctx.saved_tensors
        narrow = gradient.to(hidden.dtype)
        of_hidden = multiply(narrow, weight.to(hidden.dtype), ctx.dtype) if ctx.needs_input_grad[0] else None
        of_weight = multiply(narrow.T, hidden, ctx.dtype) if ctx.needs_input_grad[1] else None
        return of_hidden, of_weight, None  # autograd rounds them to the dtypes of the inputs
