"""An embedding whose matrix is that of the head too: both gradients become one without a tensor of its size in between.

With a vocabulary of 152,000 the gradient of the embedding is a matrix of mostly zeros, as large as the model's largest
parameter, and is made at the peak of a step. Where the head has just added its own gradient to `grad` (see
`Distributions.adds_to_grad`), the rows of the tokens are added there too. On a CPU alone: a CUDA device would add rows
of a repeated token in any order, and a resumed run would differ.

Axes: B rows, T tokens, V vocabulary, D width of the model.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional


def add_to_gradient_of_head(embedding: nn.Module, head: nn.Module | None) -> None:
    """Have `embedding`, if it is a plain one, add its gradient to that of `head`, if both have one matrix."""
    plain = type(embedding) is nn.Embedding and embedding.max_norm is None and not embedding.scale_grad_by_freq
    if plain and not embedding.sparse and head is not None and embedding.weight is head.weight:
        embedding.forward = MethodType(_embedded, embedding)


def _embedded(embedding: Any, tokens: Tensor) -> Tensor:
    weight: Tensor = embedding.weight
    hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks  # noqa: SLF001 (there is no public name)
    if torch.compiler.is_compiling() or weight.device.type != "cpu" or not weight.is_leaf or hooks:
        return functional.embedding(tokens, weight, embedding.padding_idx)
    found: Tensor = _Embedded.apply(tokens, weight, embedding.padding_idx)  # type: ignore[no-untyped-call]
    return found


class _Embedded(torch.autograd.Function):
    """The rows [B, T, D] of a matrix [V, D] for tokens [B, T]."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight, ctx.padding_idx, ctx.before = weight, padding_idx, _state_of(weight.grad)
        return functional.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] (torch's own decorator)
        (tokens,), weight = ctx.saved_tensors, ctx.weight
        rows, flat = gradient.flatten(0, -2), tokens.flatten()
        if ctx.padding_idx is not None:
            real = flat != ctx.padding_idx
            rows, flat = rows[real], flat[real]
        # The head adds its gradient in a backward pass before this; without such a head it returns it, and so do we.
        if weight.grad is not None and _state_of(weight.grad) != ctx.before:
            weight.grad.index_add_(0, flat, rows.to(weight.grad.dtype))
            return None, None, None
        own = torch.zeros_like(weight).index_add_(0, flat, rows.to(weight.dtype))
        return None, own, None


def _state_of(gradient: Tensor | None) -> tuple[int, int] | None:
    """Return values of which one changes when the gradient is replaced, or something is added to it."""
    return None if gradient is None else (gradient.data_ptr(), gradient._version)  # noqa: SLF001 (there is no public name)
