"""Caches of HFModel: the layers of transformers, with rows that can be joined, and room to grow without copies.

transformers' own layer of full attention is copied for every token. Here it is a view of memory with room for more.

Axes: b rows, H heads, D width of a head.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

JOINABLE_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer"}
"""Layers of a cache of transformers with rows that can be joined, by their names in versions 4 and 5."""

ROOM = 64
"""Tokens that a copied layer has room for."""


def cache_of(states: Any, config: Any) -> HFCache:
    """Return the cache of an empty `DynamicCache` of transformers."""
    for layer in states.layers:
        if type(layer).__name__ == "DynamicLayer":
            layer.update = MethodType(partial(_update, _Growing(), _Growing()), layer)
    return HFJoinableCache(states) if _joins(states, config) else HFCache(states)


class _Growing:
    """The keys of a layer, or its values, in memory with room for more tokens."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        """[b, H, capacity, D]."""
        self._states: Tensor | None = None
        """[b, H, length, D], a view of it; those of the layer are others once rows or tokens were selected."""

    def add(self, states: Tensor, added: Tensor) -> Tensor:
        """Return [b, H, length + T, D] of `states` and `added`."""
        length = states.shape[2] if states.numel() else 0
        end = length + added.shape[2]
        if self._memory is None or states is not self._states or end > self._memory.shape[2]:
            self._memory = self._states = None  # not kept beside the copy, unless it is copied
            rows, heads, _, width = added.shape
            self._memory = added.new_empty(rows, heads, end + ROOM, width)
            if length:
                self._memory[:, :, :length] = states
        self._memory[:, :, length:end] = added
        self._states = self._memory[:, :, :end]
        return self._states


def _update(
    keys: _Growing, values: _Growing, layer: Any, more_keys: Tensor, more_values: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    """Add the keys and values of tokens [b, H, T, D] to a layer of full attention, and return all of it."""
    if torch.is_grad_enabled():  # memory that is written again cannot be differentiated
        updated: tuple[Tensor, Tensor] = type(layer).update(layer, more_keys, more_values)
        return updated
    if not layer.is_initialized:
        layer.lazy_initialization(more_keys, more_values)
    layer.keys, layer.values = keys.add(layer.keys, more_keys), values.add(layer.values, more_values)
    return layer.keys, layer.values


class HFCache:
    """A cache of transformers; see `Cache`."""

    def __init__(self, states: Any) -> None:
        self.states = states
        """A `DynamicCache`: sliding windows keep only the keys that they see."""

    def __repr__(self) -> str:
        return f"<HFCache: {self.length} tokens>"

    @property
    def length(self) -> int:
        """Return the number of tokens of a row, padding included."""
        return int(self.states.get_seq_length())

    def keep(self, rows: Tensor) -> None:
        """Keep only `rows`; see `Cache`."""
        self.states.batch_select_indices(rows)


class HFJoinableCache(HFCache):
    """A cache of layers of keys and values alone; see `JoinableCache`."""

    def join(self, other: HFJoinableCache) -> None:
        """Add the rows of `other`; see `JoinableCache`."""
        for layer, added in zip(self.states.layers, other.states.layers, strict=True):
            layer.keys = _side_by_side(layer.keys, added.keys)
            layer.values = _side_by_side(layer.values, added.values)
            if layer.is_sliding:
                layer.cumulative_length = max(layer.cumulative_length, added.cumulative_length)

    def cut(self, tokens: int) -> None:
        """Remove the first `tokens` of every row; see `JoinableCache`. A window may have dropped them already."""
        for layer in self.states.layers:
            length = layer.get_seq_length() - tokens
            begin = max(0, layer.keys.shape[-2] - length)
            layer.keys, layer.values = layer.keys[:, :, begin:], layer.values[:, :, begin:]
            if layer.is_sliding:
                layer.cumulative_length = length


def _joins(states: Any, config: Any) -> bool:
    """Return whether a token's keys and values depend on no other column of the cache, so that columns can be moved."""
    chunked = "chunked_attention" in (getattr(config.get_text_config(), "layer_types", None) or ())
    return not chunked and {type(layer).__name__ for layer in states.layers} <= JOINABLE_LAYERS


def _side_by_side(one: Tensor, other: Tensor) -> Tensor:
    """Return the rows of both [b, H, *, D], the shorter ones padded on the left."""
    width = max(one.shape[2], other.shape[2])
    return torch.cat([functional.pad(each, (0, 0, width - each.shape[2], 0)) for each in (one, other)])
