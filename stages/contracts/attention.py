"""Attention: the keys that each token of a call of a model may see, as a small value instead of a dense mask.

A model lets it compute (`over`), makes the dense mask of it, or passes what its kernel needs: the sequences of a packed
row, the padding of a cached one. Knows no model.

Axes: B rows, T tokens of this call, C visible keys (those of the cache, then the T of this call), H heads, D width of a
head.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .autocast import autocast_on
from .varlen import any_length, computes, is_for, varlen


class Attention(NamedTuple):
    """Each token sees the keys up to itself that are of its own sequence.

    >>> Attention.packed(torch.tensor([[0, 0, 1]])).mask[0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    >>> Attention.causal(torch.tensor([[False, True, True]])).mask[0].int().tolist()
    [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    """

    sequences: Tensor
    """[B, C] int64, the sequence of each key; −1 on padding. Padding sees padding alone: without any key its softmax
    would be NaN, and spread to the others."""
    tokens: int
    """T; the tokens of this call are the last ones."""
    one_sequence: bool = False
    """True if each row is known to have one sequence from its first token on: only the order of tokens hides keys, and
    a model needs no mask. Padding behind it may see everything."""
    cu_seqlens: Tensor | None = None
    """[K + 1] int32, the start in B · T of each sequence and each padding, and B · T: for kernels that skip the others.
    None where they are unknown, or keys are in a cache."""

    @classmethod
    def packed(cls, sequences: Tensor, *, one_sequence: bool = False, cu_seqlens: Tensor | None = None) -> Self:
        """Return the attention of packed rows; `sequences` [B, T] has the sequence of each token, −1 on padding."""
        return cls(sequences, sequences.shape[1], one_sequence, cu_seqlens)

    @classmethod
    def causal(cls, real: Tensor, tokens: int | None = None) -> Self:
        """Return the attention of rows of one sequence; `real` [B, C] is false on padding, on either side.

        `tokens` is T, if the keys before them are in a cache.
        """
        return cls(real.long() - 1, real.shape[1] if tokens is None else tokens)

    @property
    def mask(self) -> Tensor:
        """Return the dense mask [B, T, C] bool, true where token t may see key c."""
        visible = self.sequences.shape[1]
        earlier = torch.ones(self.tokens, visible, dtype=torch.bool, device=self.sequences.device)
        own = self.sequences[:, visible - self.tokens :, None] == self.sequences[:, None, :]
        return earlier.tril_(visible - self.tokens) & own

    def over(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention [B, H, T, D] by the kernel that suits the device, without a mask if it needs none.

        Args:
            query: [B, H, T, D].
            key: [B, heads of keys, C, D]; a head of keys may serve several of queries.
            value: as `key`.
        """
        dtype, shared = autocast_on(query.device) or query.dtype, query.shape[1] != key.shape[1]
        alone = self.one_sequence and query.shape[2] == key.shape[2]
        if not alone and self.cu_seqlens is not None and is_for(query.device, dtype) and computes(query, key, value):
            return varlen(query, key, value, self.cu_seqlens, dtype=dtype).transpose(1, 2)
        mask = None if alone else self.mask[:, None]
        with any_length(query.device):
            return scaled_dot_product_attention(query, key, value, mask, is_causal=alone, enable_gqa=shared)
