"""CausalModel: the protocol of a language model for sampling and training, with a cache of keys and values.

The caller passes the keys that each token sees (`attend`), so that left padding while sampling, packing while training
and a plain causal pass are the same code in the model, and packed sequences never attend to each other. Knows no
policy, no versions of weights, no stage.

Axes: B rows, T tokens of this call, C visible keys (T, and those in a cache), V vocabulary, H heads,
D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from ..._schemas.numbers import whole_number
from .attention import Attention


class KVCache:
    """Keys and values of the tokens that a model has read, preallocated; every row is filled to the same `length`."""

    __slots__ = ("_keys", "_values", "length")

    def __init__(
        self,
        *,
        layers: int,
        batch: int,
        heads: int,
        capacity: int,
        width: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        sizes = {"layers": layers, "batch": batch, "heads": heads, "capacity": capacity}
        shape = [whole_number(name, size) for name, size in sizes.items()]
        shape.append(whole_number("width", width, least=0))  # 0 in a model that has no keys
        self._keys = torch.empty(shape, dtype=dtype, device=device)
        self._values = torch.empty(shape, dtype=dtype, device=device)
        self.length: int = 0
        """Tokens of a row; a call of the model over T tokens adds T."""

    def __repr__(self) -> str:
        return f"<KVCache: {self.batch} rows, {self.length} of {self.capacity} tokens>"

    @property
    def batch(self) -> int:
        """Return the number of rows."""
        return self._keys.shape[1]

    @property
    def capacity(self) -> int:
        """Return the capacity of a row in tokens."""
        return self._keys.shape[3]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write this call's `keys` and `values` [B, H, T, D] of one layer; return all that the layer may see.

        The model calls it once for each layer, in order; `length` grows with the last.

        Returns:
            Keys and values, [B, H, length before + T, D], as views.

        Raises:
            ValueError: the cache has no room for T more tokens.
        """
        end = self.length + keys.shape[2]
        if end > self.capacity:
            room = self.capacity - self.length
            raise ValueError(f"expected keys of at most {room} more tokens of {self!r}, got {tuple(keys.shape)}")
        self._keys[layer, :, :, self.length : end] = keys
        self._values[layer, :, :, self.length : end] = values
        if layer == len(self._keys) - 1:
            self.length = end
        return self._keys[layer, :, :, :end], self._values[layer, :, :, :end]

    def keep(self, rows: Tensor) -> None:
        """Keep only `rows` [B'] (int64), in that order, so that finished ones cost no computation."""
        self._keys = self._keys.index_select(1, rows)
        self._values = self._values.index_select(1, rows)

    def join(self, other: KVCache) -> None:
        """Add the rows of `other` behind these, with room for all that either had room for; see `JoinableCache`."""
        length = max(self.length, other.length)
        room = max(self.capacity - self.length, other.capacity - other.length)
        parts = (self._keys, self.length), (other._keys, other.length)
        self._keys = _side_by_side(parts, length, room)
        parts = (self._values, self.length), (other._values, other.length)
        self._values = _side_by_side(parts, length, room)
        self.length = length

    def cut(self, tokens: int) -> None:
        """Remove the first `tokens` of every row; see `JoinableCache`."""
        self._keys, self._values = self._keys[:, :, :, tokens:], self._values[:, :, :, tokens:]
        self.length -= tokens


def _side_by_side(parts: Sequence[tuple[Tensor, int]], length: int, room: int) -> Tensor:
    """Return the rows of all `parts` [layers, b, H, *, D] with their lengths, padded on the left to `length`."""
    first = parts[0][0]
    layers, _, heads, _, width = first.shape
    joined = first.new_zeros(layers, sum(part.shape[1] for part, _ in parts), heads, length + room, width)
    begin = 0
    for part, own in parts:
        joined[:, begin : begin + part.shape[1], :, length - own : length] = part[:, :, :, :own]
        begin += part.shape[1]
    return joined


class Cache(Protocol):
    """Keys and values of the tokens that a model has read: a `KVCache`, or another that the model makes."""

    @property
    def length(self) -> int:
        """Return the number of tokens of a row, padding included."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Keep only `rows` [B'] (int64), in that order; a row may occur several times."""
        ...


@runtime_checkable
class HasVocabulary(Protocol):
    """A model that knows the number of its tokens, as `HFModel`: sequences with others are refused."""

    @property
    def vocabulary(self) -> int:
        """Return the number of tokens that it reads, the rows of its embedding."""
        ...


@runtime_checkable
class HasPositions(Protocol):
    """A model that knows how many positions it has, as `HFModel`: longer sequences are refused by their row."""

    @property
    def max_positions(self) -> int | None:
        """Return the number of positions in its table, and so of tokens of a sequence; None if it computes them."""
        ...


def positions_in(model: object) -> int | None:
    """Return the number of positions that `model` states; None if there is no bound, or if it states none."""
    return model.max_positions if isinstance(model, HasPositions) else None


@runtime_checkable
class JoinableCache(Cache, Protocol):
    """A cache that takes more rows while others are being sampled, as those of `KVCache` and `HFModel`.

    A sampler adds rows to other caches only when all their rows have ended.
    """

    def join(self, other: Any) -> None:
        """Add the rows of `other`, a cache of the same model, behind these.

        The last tokens of all rows are side by side: the shorter of both gets padding on the left, finite and invisible
        to every token.
        """
        ...

    def cut(self, tokens: int) -> None:
        """Remove the first `tokens` of every row: padding in all of them."""
        ...


class Read(Protocol):
    """A function of hidden states and the head that makes logits of them."""

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None = None,
        finish: Callable[[Tensor], Tensor] | None = None,
    ) -> Any:
        """Return a result of hidden states. Their logits are `finish(hidden @ weight.T + bias)`.

        Args:
            hidden: [B, T, D]; or logits [B, T, V], without a `weight`.
            weight: [V, D] of the head.
            bias: [V] of the head.
            finish: function of the products, [N, M] of N tokens and a part of the vocabulary, each by itself, without
                parameters: a bound, or a scale.
        """
        ...


class CausalModel(Protocol):
    """A decoder-only transformer: any `torch.nn.Module` with this `forward` and a `new_cache`.

    Logits [B, T, V] of a whole micro-batch are the largest tensor of a step. A model whose `forward` has one more
    argument, `read: Read | None = None`, never makes them: given `read`, without a cache, it returns
    `read(hidden, self.head.weight)` in place of `self.head(hidden)`, and the caller computes the logits of the tokens
    that train, by chunks.
    """

    def __call__(self, tokens: Tensor, *, positions: Tensor, attend: Attention, cache: Any = None) -> Tensor:
        """Return logits [B, T, V] float32 of the token that follows each of `tokens`.

        Args:
            tokens: [B, T] int64.
            positions: [B, T] int64, position of each token within its own sequence.
            attend: the keys that each token sees; `attend.mask` is [B, T, C] bool. Every token sees at least itself.
            cache: one of `new_cache`, with the keys before these tokens; it stores theirs, and C = cache.length + T.
                Without a cache C = T.
        """
        ...

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """Return an empty cache of the model's own shape, for `batch` rows of at most `capacity` tokens."""
        ...

    def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002 (torch's own signature)
        """See `torch.nn.Module.train`."""
        ...

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """See `torch.nn.Module.parameters`."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """See `torch.nn.Module.state_dict`."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any:
        """See `torch.nn.Module.load_state_dict`."""
        ...


@runtime_checkable
class SavedModel(Protocol):
    """A model with files beside its weights, so that other programs load its checkpoints."""

    folder: Path
    """The folder that it was made of, with its tokenizer if it has one."""

    @property
    def weights_file(self) -> str:
        """Return the name of the file for `state_dict()`."""
        ...

    def write_files(self, folder: Path) -> None:
        """Write the files beside the weights into `folder`."""
        ...


@runtime_checkable
class PackingModel(Protocol):
    """A model that can tell whether its packed sequences see each other: a trainer asks it in its first step."""

    def check_packing(self) -> None:
        """Check that no sequence sees another one of its row, on the model's device and under the autocast around it.

        All ranks that share a model call it together. The result is kept.

        Raises:
            InvalidConfig: a sequence sees another one.
        """
        ...


def check_packing(model: Any) -> None:
    """Let `model` check that its packed sequences do not see each other, if it can tell; see `PackingModel`."""
    if isinstance(model, PackingModel):
        model.check_packing()


@runtime_checkable
class HasPacking(Protocol):
    """A model that states whether its rows may have several sequences, as `HFModel`; others may."""

    @property
    def packs(self) -> bool:
        """Return false if a layer keeps a state of the tokens before, padding on the left included."""
        ...


def packs(model: object) -> bool:
    """Return whether a row of `model` may have several sequences, and padding before them."""
    return model.packs if isinstance(model, HasPacking) else True


@runtime_checkable
class IdentifiedModel(Protocol):
    """A model that a continued run can compare with the one that it began with."""

    def identity(self) -> dict[str, Any]:
        """Return the identity of the model, as JSON values: tensors of a checkpoint belong to it. Blocks."""
        ...

    def compare(self, checkpoint: Path) -> None:
        """Warn of differences between this model and the files beside the weights of a checkpoint. Blocks."""
        ...


def positions_of(mask: Tensor) -> Tensor:
    """Return [B, L] int64 the position of each token in its row, 0 on padding; `mask` [B, L] is true on real tokens.

    >>> positions_of(torch.tensor([[False, True, True]])).tolist()
    [[0, 0, 1]]
    """
    return (mask.cumsum(dim=1) - 1).clamp_(min=0)
