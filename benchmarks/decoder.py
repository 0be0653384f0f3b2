"""A decoder-only transformer of any size, with random weights, for timing training steps.

Axes: B rows, T tokens, H heads, D width of a head, W width of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from penstock.torch import Attention, KVCache

__all__ = ["Decoder", "Size"]


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a decoder."""

    vocabulary: int
    layers: int
    width: int
    heads: int
    longest: int
    """Tokens of the longest sequence."""


class _Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self._heads = size.heads
        self.before_attention, self.before_mlp = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.projected = nn.Linear(size.width, 3 * size.width, bias=False)
        self.attended = nn.Linear(size.width, size.width, bias=False)
        self.up = nn.Linear(size.width, 4 * size.width, bias=False)
        self.down = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: Tensor, attend: Attention) -> Tensor:
        rows, tokens, _ = x.shape
        projected: Tensor = self.projected(self.before_attention(x))
        queries, keys, values = projected.view(rows, tokens, 3, self._heads, -1).permute(2, 0, 3, 1, 4)  # [B, H, T, D]
        seen = attend.over(queries, keys, values)
        x = x + self.attended(seen.transpose(1, 2).flatten(2))
        forwarded: Tensor = self.down(functional.gelu(self.up(self.before_mlp(x))))
        return x + forwarded


class Decoder(nn.Module):
    """A `CausalModel` that is trained, and never sampled from."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.longest, size.width)
        self.layers = nn.ModuleList(_Layer(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor, *, positions: Tensor, attend: Attention, cache: KVCache | None = None) -> Tensor:
        """Return logits; see `CausalModel`. A cache is an error."""
        if cache is not None:
            raise ValueError("expected no cache: this model only trains")
        x = self.tokens(tokens) + self.positions(positions)
        for layer in self.layers:
            x = layer(x, attend)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Raise NotImplementedError; see `CausalModel`."""
        raise NotImplementedError(f"{batch} rows of {capacity} tokens: this model only trains")
