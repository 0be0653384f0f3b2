"""A model without attention, whose next token depends on the last one alone, and a tokenizer of its 26 letters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from penstock.torch import Attention, KVCache

VOCABULARY = 27
EOS = 26


class Bigram(nn.Module):
    """A table of logits: row t has those of the token after t."""

    def __init__(self, spread: float = 2.0) -> None:
        super().__init__()
        drawn = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))
        self.table = nn.Parameter(spread * drawn)

    def forward(self, tokens: Tensor, *, positions: Tensor, attend: Attention, cache: KVCache | None = None) -> Tensor:  # noqa: ARG002 (the protocol's)
        if cache is not None:
            nothing = torch.zeros(len(tokens), 1, tokens.shape[1], 0)
            cache.append(0, nothing, nothing)
        return self.table[tokens]

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return KVCache(layers=1, batch=batch, heads=1, capacity=capacity, width=0)


class Alphabet:
    """Token t is the letter number t; the end token is written as a full stop."""

    eos_id = EOS

    def encode(self, text: str) -> list[int]:
        return [EOS if letter == "." else ord(letter) - ord("a") for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("." if token == EOS else chr(ord("a") + token) for token in ids)
