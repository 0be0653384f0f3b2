"""Distributions: the policy's distributions over the vocabulary, computed by chunks of tokens, never all at once.

With a vocabulary V of 152,000, the log-probabilities [T, V] of 4096 tokens take 2.5 GB, and a loss on them keeps
several tensors of that size. Here a chunk of them is computed from hidden states, functions are applied to it, and
only their values are kept; the backward pass computes each chunk again. Arithmetic after the head is at least float32.

Axes: T tokens that train, C of them in a chunk, V vocabulary, D width of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..contracts.support import restricted
from .products import add_product, dtype_of_products, linear, products_of
from .tiles import ByTiles, Finish

NUMBERS_AT_ONCE = 2**23
"""Numbers of a chunk, C · V: 32 MB in float32. A backward pass holds about five of these at a time. With twice as many,
a step on one core took a quarter longer with a vocabulary of 152,000, but its memory grew by half as much (1.1 GB)."""

TIMES_ON_A_DEVICE = 8
"""Factor of it on an accelerator, where 55 rows of 152,000 numbers would wait for the weights of the head."""


class OfDistributions(Protocol):
    """A function of the distributions of a chunk."""

    def __call__(self, predicted: Tensor, /, *columns: Tensor) -> Tensor:
        """Return a tensor [C, ...] of log-probabilities `predicted` [C, V] and the same rows of the columns."""
        ...


@dataclass(frozen=True, slots=True)
class Distributions:
    """The distributions that tokens were drawn from."""

    hidden: Tensor
    """[T, D] states that the head predicts each token from, in the dtype of their products with weights; or logits
    [T, V], if there is no `weight`."""
    weight: Tensor | None = None
    """[V, D] of the head."""
    bias: Tensor | None = None
    """[V] of the head."""
    finish: Finish | None = None
    """Applied to the products of the head."""
    temperature: float | Tensor = 1.0
    """Logits are divided by it; [T, 1] where tokens have temperatures of their own."""
    support: Tensor | None = None
    """[T, W] the tokens that each was drawn from, the others have no probability; see `restricted`. None for all."""
    adds_to_grad: bool = False
    """True if a backward pass may add the gradient of `weight` to its `grad` itself, without a tensor of its size in
    between. Then `torch.autograd.grad` does not return it."""
    backward_dtype: torch.dtype | None = None
    """dtype of the numbers that `over` multiplies for gradients of hidden states and head; None for that of hidden
    states."""

    def __len__(self) -> int:
        """Return T."""
        return len(self.hidden)

    def __getitem__(self, rows: Any) -> Distributions:
        """Return those of some tokens: a slice, a mask, or indices."""
        own, support = self.temperature, self.support
        return replace(
            self,
            hidden=self.hidden[rows],
            temperature=own[rows] if isinstance(own, Tensor) else own,
            support=None if support is None else support[rows],
        )

    @property
    def vocabulary(self) -> int:
        """Return V."""
        return self.hidden.shape[1] if self.weight is None else self.weight.shape[0]

    @property
    def is_models_own(self) -> bool:
        """Return whether they are those of the model: at temperature 1, over the whole vocabulary."""
        return not isinstance(self.temperature, Tensor) and self.temperature == 1 and self.support is None

    def models_own(self) -> Distributions:
        """Return those of the model: at temperature 1, over the whole vocabulary."""
        return replace(self, temperature=1.0, support=None)

    def whole(self) -> Tensor:
        """Return [T, V] log-probabilities, with gradient: as large as a chunk must not be."""
        products = self.hidden if self.weight is None else linear(self.hidden, self.weight, self.bias)
        return _logprobs(products, self.finish, self.temperature, self.support)

    def chunks(self, tokens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield log-probabilities [C, V] of each chunk, without gradient, and its part of `tokens` [T]."""
        for rows in _rows(self.hidden, self.vocabulary):
            yield self[rows].whole().detach(), tokens[rows]

    def logprobs_of(self, tokens: Tensor) -> Tensor:
        """Return [T] the log-probability of each of `tokens` [T]."""
        return self.over([logprobs_of], tokens)[0]

    def over(self, functions: Sequence[OfDistributions], *columns: Tensor) -> tuple[Tensor, ...]:
        """Return the values [T, ...] of each function of the distributions.

        Gradients flow to hidden states and head, not to `columns` [T, ...] or anything else that a function uses.
        """
        if set(functions) <= {logprobs_of, entropy_of}:
            return self._by_tiles(functions, columns[0])
        own = self.temperature
        tempers, common = (own, 1.0) if isinstance(own, Tensor) else (None, own)
        how = _How(functions, self.finish, common, self.vocabulary, self.backward_dtype)
        found: tuple[Tensor, ...] = _ByChunks.apply(  # type: ignore[no-untyped-call]
            how, self.hidden, self.weight, self.bias, tempers, self.support, *columns
        )
        return found

    @property
    def _adds_to_grad(self) -> bool:
        weight = self.weight
        if not self.adds_to_grad or weight is None or not (weight.is_leaf and weight.requires_grad):
            return False
        wide = weight.dtype == torch.promote_types(weight.dtype, torch.float32)
        hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks  # noqa: SLF001 (there is no public name)
        return wide and torch.is_grad_enabled() and not hooks

    def _by_tiles(self, functions: Sequence[OfDistributions], tokens: Tensor) -> tuple[Tensor, ...]:
        entropy = entropy_of in functions
        into = self.weight if self._adds_to_grad else None
        head = self.hidden, self.weight, self.bias
        found = ByTiles.apply(
            self.finish, self.temperature, entropy, tokens, *head, into, self.support, self.backward_dtype
        )  # type: ignore[no-untyped-call]
        values = dict(zip((logprobs_of, entropy_of), found, strict=False))
        return tuple(values[function] for function in functions)


def logprobs_of(predicted: Tensor, /, *columns: Tensor) -> Tensor:
    """Return [C] the log-probability of each token, from the first column."""
    return predicted.gather(-1, columns[0][:, None]).squeeze(-1)


def entropy_of(predicted: Tensor, /, *_: Tensor) -> Tensor:
    """Return [C] entropy in nats of distributions given as log-probabilities [C, V]; these may be −inf."""
    finite = torch.where(predicted.isneginf(), 0.0, predicted)
    return -(predicted.exp() * finite).sum(-1)


@dataclass(frozen=True, slots=True)
class _How:
    functions: Sequence[OfDistributions]
    finish: Finish | None
    temperature: float
    vocabulary: int
    backward_dtype: torch.dtype | None

    def logprobs(self, products: Tensor, tempers: Tensor | None, support: Tensor | None) -> Tensor:
        return _logprobs(products, self.finish, self.temperature if tempers is None else tempers, support)


class _ByChunks(torch.autograd.Function):
    """Applies functions to chunks; the backward pass computes each chunk again, and adds up the head's gradient."""

    @staticmethod
    def forward(  # noqa: PLR0917 (tensors must be arguments of their own)
        ctx: Any,
        how: _How,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        tempers: Tensor | None,
        support: Tensor | None,
        *columns: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.how = how
        ctx.save_for_backward(hidden, weight, bias, tempers, support, *columns)
        ctx.set_materialize_grads(False)
        found: list[list[Tensor]] = [[] for _ in how.functions]
        head = _Products(hidden, weight, bias)
        for rows in _rows(hidden, how.vocabulary):
            predicted = how.logprobs(head(rows), _of(tempers, rows), _of(support, rows))
            for values, function in zip(found, how.functions, strict=True):
                values.append(function(predicted, *(column[rows] for column in columns)))
        return tuple(torch.cat(values) for values in found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        how: _How = ctx.how
        hidden, weight, bias, tempers, support, *columns = ctx.saved_tensors
        given = zip(how.functions, gradients, strict=True)
        wanted = [(function, gradient) for function, gradient in given if gradient is not None]
        head = _Products(hidden, weight, bias)
        sums = _Gradients(head, weight, bias, ctx.needs_input_grad[1:4], how.backward_dtype)
        for rows in _rows(hidden, how.vocabulary) if wanted else ():
            with torch.enable_grad():
                products = head(rows).detach().requires_grad_()
                predicted = how.logprobs(products, _of(tempers, rows), _of(support, rows))
                values = [function(predicted, *(column[rows] for column in columns)) for function, _ in wanted]
                del predicted
            (of_products,) = torch.autograd.grad(values, products, [gradient[rows] for _, gradient in wanted])
            sums.add(rows, of_products)
        return None, sums.hidden, sums.weight, sums.bias, *[None] * (2 + len(columns))


class _Products:
    """The products of the head, of a chunk at a time, without gradient; a weight of another dtype is cast once."""

    def __init__(self, hidden: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
        self.hidden, self._bias = hidden, bias
        self.weight = None if weight is None else weight.to(hidden.dtype)
        self.dtype = hidden.dtype if weight is None else dtype_of_products(hidden, weight)

    def __call__(self, rows: slice) -> Tensor:
        """Return [C, V]; or the logits themselves."""
        hidden = self.hidden[rows]
        return hidden if self.weight is None else products_of(hidden, self.weight, self._bias, self.dtype)


class _Gradients:
    """Sums of the gradients of hidden states and head, over chunks."""

    def __init__(
        self,
        head: _Products,
        weight: Tensor | None,
        bias: Tensor | None,
        needed: tuple[bool, bool, bool],
        dtype: torch.dtype | None,
    ) -> None:
        dtype = (None if weight is None else dtype) or head.hidden.dtype
        self._states = head.hidden.to(dtype)
        self._matrix = None if head.weight is None else head.weight.to(dtype)
        self.hidden = torch.zeros_like(head.hidden, dtype=head.dtype) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=_wide(weight)) if weight is not None and needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=_wide(bias)) if bias is not None and needed[2] else None

    def add(self, rows: slice, products: Tensor) -> None:
        """Add those of a chunk, of the gradient of its products [C, V]."""
        factor = products.to(self._states.dtype)
        if self.hidden is not None:
            if self._matrix is None:
                self.hidden[rows] = factor
            else:
                add_product(self.hidden[rows], factor, self._matrix)
        if self.weight is not None:
            add_product(self.weight, factor.T, self._states[rows])
        if self.bias is not None:
            self.bias += products.sum(0)


def _wide(tensor: Tensor) -> torch.dtype:
    """Return the dtype of the sums of chunks: many sums in bfloat16 would lose digits."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _rows(hidden: Tensor, vocabulary: int) -> Iterator[slice]:
    """Yield the rows of each chunk of `hidden` [T, D]; of one empty chunk, if there are no tokens."""
    numbers = NUMBERS_AT_ONCE * (1 if hidden.device.type == "cpu" else TIMES_ON_A_DEVICE)
    tokens, at_once = len(hidden), max(1, numbers // vocabulary)
    for first in range(0, max(1, tokens), at_once):
        yield slice(first, min(first + at_once, tokens))


def _of(column: Tensor | None, rows: slice) -> Tensor | None:
    return None if column is None else column[rows]


def _logprobs(products: Tensor, finish: Finish | None, temperature: float | Tensor, support: Tensor | None) -> Tensor:
    logits = products if finish is None else finish(products)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if isinstance(temperature, Tensor) or temperature != 1:  # a division by 1 would only copy them
        logits = logits / temperature
    if support is not None:
        logits = restricted(logits.clone(), support)
    return torch.log_softmax(logits, dim=-1)
