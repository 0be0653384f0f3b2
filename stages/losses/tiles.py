"""Log-probabilities and entropies of tokens, by tiles of the products of hidden states and head.

A tile is small enough for the caches of a processor, and its memory is used for the next one: fresh memory for each
chunk took as long as the products. The normalizers are summed over tiles as they come (Milakov and Gimelshein, 2018,
arXiv:1805.02867). The backward pass computes each tile again. Arithmetic after the head is at least float32.

Axes: T tokens that train, C of them in a tile, V vocabulary, B of it in a tile, D width of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..contracts.support import restricted
from .products import add_product, dtype_of_products, products_of

NUMBERS_OF_A_TILE = 2**21
"""C · B: 8 MB in float32. With eight times as many, they are in no cache; a quarter is no faster."""

TOKENS_OF_A_TILE = 1024
"""C at most: a product of fewer tokens is slower, because the weights are read for each tile."""

TIMES_ON_A_DEVICE = 32
"""Factor of NUMBERS_OF_A_TILE on an accelerator: it waits for the host with small tiles. On an H100, with 8,192 tokens,
D 896 and V 152,000: 70 ms with it, 93 ms with a quarter, 196 ms with an eighth, 67 ms with four times as many, and 1.7
GB more."""

TOKENS_ON_A_DEVICE = 4096
"""C at most on an accelerator: 4 to 7 % faster than with 1,024 there."""

MULTIPLE = 64
"""Of B: cuBLAS multiplies into rows of any other number of columns by kernels of an older device."""

LOWEST = -1000.0
"""In place of lower exponents (some are −inf): its exponential is 0 too, and 0 · −inf would be NaN."""

Finish: TypeAlias = Callable[[Tensor], Tensor]
"""Makes logits of the products of the head, each of one number: a bound on them, or a scale."""


@dataclass(frozen=True, slots=True)
class Head:
    """Makes logits of hidden states, a tile after the other."""

    hidden: Tensor
    """[T, D] in the dtype of their products; or logits [T, V], if there is no `weight`."""
    weight: Tensor | None
    """[V, D], each part cast to that dtype."""
    bias: Tensor | None
    """[V]."""
    finish: Finish | None
    temperature: float | Tensor
    """Logits are divided by it; [T, 1] where tokens have their own."""
    support: Tensor | None = None
    """[T, W] the tokens that each was drawn from; see `restricted`."""
    backward_dtype: torch.dtype | None = None
    """dtype of the numbers that are multiplied for gradients; None for that of hidden states."""
    memory: list[Tensor] = field(default_factory=list)
    """Of the tile before."""
    cast: dict[torch.dtype, tuple[int, Tensor]] = field(default_factory=dict)
    """The weights of the part of the tile before, and its first token, by the dtype that they were cast to."""

    @property
    def wide(self) -> torch.dtype:
        """Return the dtype of the arithmetic behind the head."""
        return torch.promote_types((self.hidden if self.weight is None else self.weight).dtype, torch.float32)

    def tiles(self) -> Iterator[Tile]:
        """Yield all tiles: those of the same part of the vocabulary together, so that its weights stay in the cache."""
        on_a_cpu = self.hidden.device.type == "cpu"
        numbers = NUMBERS_OF_A_TILE * (1 if on_a_cpu else TIMES_ON_A_DEVICE)
        tokens, vocabulary = len(self.hidden), self.vocabulary
        if self.is_narrow:  # sums of parts of the vocabulary would be rounded to few digits
            high, width = max(1, numbers // vocabulary), vocabulary
        else:
            high = min(max(1, tokens), TOKENS_OF_A_TILE if on_a_cpu else TOKENS_ON_A_DEVICE)
            width = max(MULTIPLE, numbers // high // MULTIPLE * MULTIPLE)
        for first in range(0, vocabulary, width):
            part = slice(first, min(first + width, vocabulary))
            for row in range(0, tokens, high):
                yield Tile(slice(row, min(row + high, tokens)), part)

    @property
    def vocabulary(self) -> int:
        """Return V."""
        return self.hidden.shape[1] if self.weight is None else self.weight.shape[0]

    @property
    def may_be_infinite(self) -> bool:
        """Return whether logits may be −inf: products of finite numbers in float32 are not."""
        changed = self.bias is not None or self.finish is not None or self.support is not None
        return self.weight is None or changed or self.is_narrow

    @property
    def is_narrow(self) -> bool:
        """Return whether the products have fewer digits than float32."""
        return self.weight is not None and dtype_of_products(self.hidden, self.weight) != self.wide

    def weights(self, part: slice, dtype: torch.dtype) -> Tensor:
        """Return [B, D] the weights of a part of the vocabulary in `dtype`."""
        if self.weight is None:
            raise ValueError("expected a head with weights, got logits")
        if self.weight.dtype == dtype:
            return self.weight[part]
        start, cast = self.cast.get(dtype, (None, self.weight))
        if start != part.start:
            cast = self.weight[part].to(dtype)
            self.cast[dtype] = part.start, cast
        return cast

    def products(self, tile: Tile) -> Tensor:
        """Return the products [C, B] of a tile, in memory that the next call overwrites."""
        if self.weight is None:
            return self._memory(tile, self.hidden.dtype).copy_(self.hidden[tile.rows, tile.part])
        hidden, weight = self.hidden[tile.rows], self.weights(tile.part, self.hidden.dtype)
        dtype = dtype_of_products(self.hidden, self.weight)
        bias = None if self.bias is None else self.bias[tile.part]
        return products_of(hidden, weight, bias, dtype, self._memory(tile, dtype))

    def logits(self, products: Tensor, tile: Tile) -> Tensor:
        """Return logits [C, B] of the products of a tile, in their memory if they need no other."""
        logits = (products if self.finish is None else self.finish(products)).to(self.wide)
        support = None if self.support is None else self.support[tile.rows]
        logits = logits if self._is_untempered else logits.div_(self.temperature_of(tile))
        return restricted(logits, support, tile.part.start)

    def of_products(self, gradient: Tensor, products: Tensor) -> Tensor:
        """Return the gradient of the products, of that of the logits before the temperature."""
        gradient = gradient.to(products.dtype)
        if self.finish is None:
            return gradient
        with torch.enable_grad():
            leaf = products.detach().requires_grad_()
            finished = self.finish(leaf)
        return torch.autograd.grad(finished, leaf, gradient.to(finished.dtype))[0]

    @property
    def _is_untempered(self) -> bool:
        return not isinstance(self.temperature, Tensor) and self.temperature == 1

    def temperature_of(self, tile: Tile) -> float | Tensor:
        """Return the temperature of a tile: a number, or [C, 1]."""
        return self.temperature[tile.rows] if isinstance(self.temperature, Tensor) else self.temperature

    def _memory(self, tile: Tile, dtype: torch.dtype) -> Tensor:
        shape = tile.rows.stop - tile.rows.start, tile.part.stop - tile.part.start
        if not self.memory:  # the first tile is the largest
            self.memory.append(torch.empty(shape[0] * shape[1], dtype=dtype, device=self.hidden.device))
        return self.memory[0][: shape[0] * shape[1]].view(shape)


class Tile(NamedTuple):
    """Some tokens, and a part of the vocabulary."""

    rows: slice
    part: slice


class _Sums:
    """Normalizers and entropies of tokens over the tiles so far, [T, 1] each."""

    def __init__(self, like: Tensor, dtype: torch.dtype, *, may_be_infinite: bool) -> None:
        shape = len(like), 1
        self._may_be_infinite = may_be_infinite
        self.highest = like.new_full(shape, torch.finfo(dtype).min, dtype=dtype)
        """The largest logit."""
        self.total = like.new_zeros(shape, dtype=dtype)
        """Sum of exp(logit − highest)."""
        self.weighted = like.new_zeros(shape, dtype=dtype)
        """Sum of exp(logit − highest) · (logit − highest)."""
        self.own = like.new_zeros(shape, dtype=dtype)
        """Logit of the token itself."""

    def add(self, logits: Tensor, tokens: Tensor, tile: Tile, *, entropy: bool) -> None:
        """Add a tile; overwrites its `logits` [C, B]. `tokens` [C] are those of its rows."""
        rows = tile.rows
        highest, total, weighted = self.highest[rows], self.total[rows], self.weighted[rows]
        inside, place = _places(tokens, tile)
        self.own[rows] = torch.where(inside, logits.gather(1, place), self.own[rows])
        new = torch.maximum(highest, logits.amax(1, keepdim=True))
        moved = (highest - new).clamp_(min=LOWEST)
        shifted = logits.sub_(new)
        if entropy:
            exponentials = (shifted.clamp_(min=LOWEST) if self._may_be_infinite else shifted).exp()
            weighted.addcmul_(moved, total).mul_(moved.exp()).add_((shifted.mul_(exponentials)).sum(1, keepdim=True))
        else:
            exponentials = shifted.exp_()
        total.mul_(moved.exp_()).add_(exponentials.sum(1, keepdim=True))
        highest.copy_(new)

    def logprobs(self) -> Tensor:
        """Return [T, 1] the log-probability of each token."""
        return self.own - self.highest - self.total.log()

    def entropies(self) -> Tensor:
        """Return [T, 1] entropies in nats."""
        return self.total.log() - self.weighted / self.total


class ByTiles(torch.autograd.Function):
    """Returns log-probabilities [T] of tokens and, where `entropy`, entropies [T]; see `Distributions.over`."""

    @staticmethod
    def forward(  # noqa: PLR0917 (tensors must be arguments of their own)
        ctx: Any,
        finish: Finish | None,
        temperature: float | Tensor,
        entropy: bool,  # noqa: FBT001 (torch passes arguments by position)
        tokens: Tensor,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        into: Tensor | None,
        support: Tensor | None,
        backward_dtype: torch.dtype | None,
    ) -> tuple[Tensor, ...]:
        """Return the values; tensors are `Head`'s, and the gradient of its weight is added to that of `into`."""
        head = Head(hidden, weight, bias, finish, temperature, support)
        sums = _Sums(hidden, head.wide, may_be_infinite=head.may_be_infinite)
        for tile in head.tiles():
            sums.add(head.logits(head.products(tile), tile), tokens[tile.rows], tile, entropy=entropy)
        normalizers, entropies = sums.highest + sums.total.log(), sums.entropies() if entropy else None
        ctx.finish, ctx.temperature, ctx.into, ctx.backward_dtype = finish, temperature, into, backward_dtype
        ctx.save_for_backward(tokens, hidden, weight, bias, support, normalizers, entropies)
        ctx.set_materialize_grads(False)
        found = [sums.logprobs(), *([] if entropies is None else [entropies])]
        return tuple(values.squeeze(1) for values in found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] (torch's own decorator)
        """Return the gradients of hidden states, weight and bias of the head."""
        tokens, hidden, weight, bias, support, normalizers, entropies = ctx.saved_tensors
        of_logprobs, of_entropies = (None if each is None else each[:, None] for each in (*given, None)[:2])
        head = Head(hidden, weight, bias, ctx.finish, ctx.temperature, support, ctx.backward_dtype)
        factors, own = _row_factors(of_logprobs, of_entropies, normalizers)
        sums = _Gradients(head, ctx.needs_input_grad[4:7], ctx.into, factors / ctx.temperature)
        for tile in head.tiles() if any(each is not None for each in given) else ():
            rows = tile.rows
            products = head.products(tile)
            logprobs = head.logits(products, tile).sub_(normalizers[rows])
            gradient = _of_logits(logprobs, _rows(of_logprobs, rows), _rows(of_entropies, rows), _rows(entropies, rows))
            if own is not None:
                inside, place = _places(tokens[rows], tile)
                gradient.scatter_add_(1, place, torch.where(inside, own[rows], 0.0))
            sums.add(tile, head.of_products(gradient, products))
        of_weight = None if ctx.into is not None else sums.weight
        return None, None, None, None, sums.of_hidden(), of_weight, sums.bias, None, None, None


class _Gradients:
    """Sums of the gradients of hidden states and head, over tiles; all those of a token have its factor [T, 1]."""

    def __init__(self, head: Head, needed: tuple[bool, bool, bool], into: Tensor | None, factors: Tensor) -> None:
        self._head, self._factors = head, factors
        weight, bias = head.weight, head.bias
        self._dtype = (None if weight is None else head.backward_dtype) or head.hidden.dtype
        self._states = head.hidden if weight is None else (head.hidden * factors).to(self._dtype)
        of_hidden = head.hidden.dtype if weight is None else dtype_of_products(head.hidden, weight)
        self.hidden = torch.zeros_like(head.hidden, dtype=of_hidden) if needed[0] else None
        if into is None:
            self.weight = torch.zeros_like(weight, dtype=head.wide) if weight is not None and needed[1] else None
        else:
            self.weight = torch.zeros_like(into) if into.grad is None else into.grad
            into.grad = self.weight
        self.bias = torch.zeros_like(bias, dtype=head.wide) if bias is not None and needed[2] else None

    def add(self, tile: Tile, products: Tensor) -> None:
        """Add those of a tile, of the gradient of its products [C, B] without the factors."""
        rows, part, head = tile.rows, tile.part, self._head
        factor = products.to(self._dtype)
        if self.hidden is not None:
            if head.weight is None:
                self.hidden[rows, part] = factor
            else:
                add_product(self.hidden[rows], factor, head.weights(part, self._dtype))
        if self.weight is not None:
            add_product(self.weight[part], factor.T, self._states[rows])
        if self.bias is not None:
            self.bias[part] += (products * self._factors[rows]).sum(0)

    def of_hidden(self) -> Tensor | None:
        """Return that of hidden states."""
        return None if self.hidden is None else self.hidden.mul_(self._factors)


def _row_factors(
    of_logprobs: Tensor | None, of_entropies: Tensor | None, normalizers: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return [T, 1] factors of all gradients of a token's logits, and [T, 1] the part of its own logit.

    Such a factor is multiplied with hidden states [T, D]: with each tile it would be one more pass over the vocabulary.
    """
    if of_logprobs is None or of_entropies is not None:
        return torch.ones_like(normalizers), of_logprobs
    return -of_logprobs, -torch.ones_like(of_logprobs)


def _of_logits(
    logprobs: Tensor, of_logprobs: Tensor | None, of_entropies: Tensor | None, entropies: Tensor | None
) -> Tensor:
    """Return the gradient [C, B] of logits, without the part of the token's own logit; overwrites `logprobs` [C, B].

    That of a log-probability is −p, that of an entropy H is −p · (log p + H). That of log-probabilities alone is
    returned without its factor; see `_row_factors`.
    """
    if of_entropies is None or entropies is None:
        return logprobs.exp_()
    probabilities = logprobs.clamp_(min=LOWEST).exp()
    factors = logprobs.add_(entropies).mul_(-of_entropies)
    return (factors if of_logprobs is None else factors.sub_(of_logprobs)).mul_(probabilities)


def _places(tokens: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """Return [C, 1] whether each of `tokens` [C] is in the vocabulary of a tile, and its place there; else 0."""
    place = tokens[:, None] - tile.part.start
    inside = (place >= 0) & (place < tile.part.stop - tile.part.start)
    return inside, torch.where(inside, place, 0)


def _rows(values: Tensor | None, rows: slice) -> Tensor | None:
    return None if values is None else values[rows]
