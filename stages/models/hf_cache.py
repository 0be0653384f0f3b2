"""Caches of HFModel: the layers of transformers, with rows that can be joined, and room to grow without copies.

transformers' own layer of full attention is copied for every token. Here it is a view of memory with room for more. A
layer of linear attention, or a convolution, has one state of all tokens of a row.

Axes: b rows, H heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

KEYS = {
    "DynamicIndexedLayer",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
}
"""Layers of a cache of transformers with the keys and values of tokens, by their names in versions 4 and 5."""

STATES = {
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
}
"""Layers with states of all tokens of a row, by their names in version 5."""

GROWING = {"DynamicLayer", "LinearAttentionAndFullAttentionLayer"}
"""Layers with the keys of all tokens."""

INDEX = "indexer_keys"
"""Attribute of a layer that chooses keys by an index, [b, length, D]."""

NOTHING = {"DummyLayer"}
"""Layers that keep nothing."""

ROOM = 64
"""Tokens that a copied layer has room for."""


def cache_of(states: Any, config: Any) -> HFCache:
    """Return the cache of an empty `DynamicCache` of transformers."""
    for layer in states.layers:
        if type(layer).__name__ in GROWING:
            layer.update = MethodType(partial(_update, _Growing(), _Growing()), layer)
    return HFJoinableCache(states) if _joins(states, config) else HFCache(states)


def blocks_with_states(module: nn.Module) -> list[Any]:
    """Return the layers of `module` that keep their states in themselves (RecurrentGemma)."""
    return [block for block in module.modules() if hasattr(block, "conv1d_state") and hasattr(block, "rg_lru")]


@contextmanager
def lent_states(blocks: Sequence[Any], states: Any) -> Iterator[None]:
    """Lend the states of a cache to `blocks_with_states` of its model."""
    layers = [layer for layer in states.layers if type(layer).__name__ in STATES] if blocks else []
    pairs = list(zip(blocks, layers, strict=True))
    for block, layer in pairs:
        block.conv1d_state, block.rg_lru.recurrent_states = layer.conv_states[0], layer.recurrent_states[0]
    try:
        yield
    finally:
        for block, layer in pairs:
            layer.conv_states[0], layer.recurrent_states[0] = block.conv1d_state, block.rg_lru.recurrent_states
            block.conv1d_state = block.rg_lru.recurrent_states = None


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
        self.length = 0
        """Tokens of a row, padding included; the model adds those of each call."""

    def __repr__(self) -> str:
        return f"<HFCache: {self.length} tokens>"

    def keep(self, rows: Tensor) -> None:
        """Keep only `rows`; see `Cache`."""
        for layer in self.states.layers:
            for states in _states_of(layer):
                states.update({at: each.index_select(0, rows) for at, each in states.items() if each is not None})
            if type(layer).__name__ not in STATES - KEYS:
                layer.batch_select_indices(rows)


class HFJoinableCache(HFCache):
    """A cache of layers of keys and values, or states; see `JoinableCache`."""

    def join(self, other: HFJoinableCache) -> None:
        """Add the rows of `other`; see `JoinableCache`."""
        for layer, added in zip(self.states.layers, other.states.layers, strict=True):
            for states, more in zip(_states_of(layer), _states_of(added), strict=True):
                pairs = {at: (each, more[at]) for at, each in states.items()}
                states.update(
                    {at: torch.cat([a, b]) for at, (a, b) in pairs.items() if a is not None and b is not None}
                )
            if type(layer).__name__ not in KEYS:
                continue
            layer.keys = _side_by_side(layer.keys, added.keys)
            layer.values = _side_by_side(layer.values, added.values)
            if (index := getattr(layer, INDEX, None)) is not None:
                layer.indexer_keys = _side_by_side(index[:, None], added.indexer_keys[:, None])[:, 0]
            if layer.is_sliding:
                layer.cumulative_length = max(layer.cumulative_length, added.cumulative_length)
        self.length = max(self.length, other.length)

    def cut(self, tokens: int) -> None:
        """Remove the first `tokens` of every row; see `JoinableCache`. A window may have dropped them already."""
        for layer in self.states.layers:
            if type(layer).__name__ not in KEYS:
                continue
            length = layer.get_seq_length() - tokens
            begin = max(0, layer.keys.shape[-2] - length)
            layer.keys, layer.values = layer.keys[:, :, begin:], layer.values[:, :, begin:]
            if (index := getattr(layer, INDEX, None)) is not None:
                layer.indexer_keys = index[:, tokens:]
            if layer.is_sliding:
                layer.cumulative_length = length
        self.length -= tokens


def _states_of(layer: Any) -> list[dict[int, Tensor | None]]:
    """Return the states of a layer, of convolutions and of linear attention, by their number; empty if it has none."""
    return [layer.conv_states, layer.recurrent_states] if type(layer).__name__ in STATES else []


def _joins(states: Any, config: Any) -> bool:
    """Return whether a token's keys and values depend on no other column of the cache, so that columns can be moved."""
    chunked = "chunked_attention" in (getattr(config.get_text_config(), "layer_types", None) or ())
    return not chunked and {type(layer).__name__ for layer in states.layers} <= KEYS | STATES | NOTHING


def _side_by_side(one: Tensor, other: Tensor) -> Tensor:
    """Return the rows of both [b, H, *, D], the shorter ones padded on the left."""
    width = max(one.shape[2], other.shape[2])
    return torch.cat([functional.pad(each, (0, 0, width - each.shape[2], 0)) for each in (one, other)])
