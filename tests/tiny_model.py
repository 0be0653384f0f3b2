"""A transformer small enough for a unit test, as a user would write one for `CausalModel` of `penstock.torch`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.torch import Attention, KVCache, Read


class TinyModel(nn.Module):
    """`layers` blocks of attention and a two-layer perceptron, with learned positions. Seeded: equal on every call."""

    def __init__(
        self,
        *,
        vocabulary: int = 11,
        width: int = 16,
        layers: int = 2,
        heads: int = 2,
        context: int = 64,
        seed: int = 0,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.token = nn.Embedding(vocabulary, width)
            self.position = nn.Embedding(context, width)
            self.attention = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
            self.mlp = nn.ModuleList(
                nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
                for _ in range(layers)
            )
            self.head = nn.Linear(width, vocabulary)
        self.heads = heads

    def forward(self, tokens: Tensor, *, positions: Tensor, attend: Attention, cache: KVCache | None = None) -> Tensor:
        logits: Tensor = self.head(self.hidden(tokens, positions, attend, cache))
        return logits

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attention, cache: KVCache | None = None) -> Tensor:
        hidden = self.token(tokens) + self.position(positions)
        mask = attend.mask[:, None]
        for layer, (project, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            hidden = hidden + self._attention(project(norm(hidden)), mask, cache, layer)
            hidden = hidden + mlp(norm(hidden))
        return norm(hidden)

    def _attention(self, projected: Tensor, mask: Tensor, cache: KVCache | None, layer: int) -> Tensor:
        rows, count, _ = projected.shape
        query, key, value = projected.view(rows, count, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if cache is not None:
            key, value = cache.append(layer, key, value)
        seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return seen.transpose(1, 2).reshape(rows, count, -1)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        width = self.head.in_features // self.heads
        return KVCache(
            layers=len(self.attention),
            batch=batch,
            heads=self.heads,
            capacity=capacity,
            width=width,
            device=self.head.weight.device,
        )


class ReadModel(TinyModel):
    """The same model, which passes its hidden states to `read`, so that no caller needs all logits."""

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor,
        attend: Attention,
        cache: KVCache | None = None,
        read: Read | None = None,
    ) -> Any:
        hidden = self.hidden(tokens, positions, attend, cache)
        return self.head(hidden) if read is None else read(hidden, self.head.weight, self.head.bias)


def norm(hidden: Tensor) -> Tensor:
    return functional.layer_norm(hidden, hidden.shape[-1:])
