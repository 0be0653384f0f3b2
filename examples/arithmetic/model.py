"""The policy: a small decoder-only transformer. Two layers, 64 wide, some 100,000 parameters.

Knows no task and no training. `CausalModel` of `penstock.torch` is the interface for sampling and training.

Axes: B rows, T tokens of this call, C keys visible, H heads, D width of a head, W width of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.torch import Attention, KVCache

from .tokenizer import TOKENIZER

__all__ = ["Shape", "Transformer", "make_model"]

torch.set_num_threads(1)  # three processes share two cores, and tensors this small gain nothing from a second thread

EMBEDDING_STD = 0.3
LOGITS_STD = 0.02


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a transformer."""

    vocabulary: int
    longest: int = 16
    """Tokens of the longest sequence."""
    layers: int = 2
    heads: int = 4
    width: int = 64


class Seen(NamedTuple):
    """The attention mask and the cache of one call."""

    attend: Tensor
    """[B, 1, T, C] bool, the same for every head."""
    cache: KVCache | None


class Layer(nn.Module):
    """Attention and a feed-forward network, each with a residual connection."""

    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        self._index = index
        self._heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.queries_keys_values = nn.Linear(shape.width, 3 * shape.width)
        self.attended = nn.Linear(shape.width, shape.width)
        self.forward_norm = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor, seen: Seen) -> Tensor:
        """Return `x` [B, T, W] plus the output of this layer."""
        x = x + self._attend(self.attention_norm(x), seen)
        forwarded: Tensor = self.down(functional.gelu(self.up(self.forward_norm(x))))
        return x + forwarded

    def _attend(self, x: Tensor, seen: Seen) -> Tensor:
        by_head = self.queries_keys_values(x).unflatten(-1, (3, self._heads, -1))  # [B, T, 3, H, D]
        queries, keys, values = by_head.permute(2, 0, 3, 1, 4)  # [B, H, T, D] each
        if seen.cache is not None:
            keys, values = seen.cache.append(self._index, keys, values)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=seen.attend)
        attended: Tensor = self.attended(mixed.transpose(1, 2).flatten(2))
        return attended


class Transformer(nn.Module):
    """A `CausalModel`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.position_embedding = nn.Embedding(shape.longest, shape.width)
        self.layers = nn.ModuleList([Layer(shape, index) for index in range(shape.layers)])
        self.norm = nn.LayerNorm(shape.width)
        self.logits = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        """Draw weights so that every layer preserves the scale of its input."""
        for embedding in (self.token_embedding, self.position_embedding):
            nn.init.normal_(embedding.weight, std=EMBEDDING_STD)
        for module in self.layers.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        nn.init.normal_(self.logits.weight, std=LOGITS_STD)

    def forward(self, tokens: Tensor, *, positions: Tensor, attend: Attention, cache: KVCache | None = None) -> Tensor:
        """Return logits; see `CausalModel`."""
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        seen = Seen(attend.mask[:, None], cache)
        for layer in self.layers:
            x = layer(x, seen)
        logits: Tensor = self.logits(self.norm(x))
        return logits

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Return an empty cache; see `CausalModel`."""
        shape = self.shape
        return KVCache(
            layers=shape.layers,
            batch=batch,
            heads=shape.heads,
            capacity=capacity,
            width=shape.width // shape.heads,
        )


def make_model() -> Transformer:
    """Return the demo's policy, untrained; its weights depend on torch's seed."""
    return Transformer(Shape(vocabulary=TOKENIZER.vocabulary))
