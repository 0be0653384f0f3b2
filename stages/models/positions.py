"""The positions of a model of transformers: how many rows its table of them has, and how many it was trained with."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

TABLE = re.compile(r"(^|[._])(wpe|\w*pos\w*)$")
"""Names of tables of positions in transformers: wpe, embed_positions, positions_embed, position_embeddings."""


def table_positions(module: Any) -> int | None:
    """Return the number of positions in the table of `module`; None for one that computes them, as rotary models do.

    A table is learned, or computed once for as many positions as the configuration has (GPT-J).
    """
    configured = getattr(module.config.get_text_config(), "max_position_embeddings", None)
    return configured if configured in set(_tables(module)) else None


def _tables(module: nn.Module) -> Iterator[int]:
    """Yield the number of positions of everything that may be a table of them."""
    for name, each in module.named_modules():
        if isinstance(each, nn.Embedding) and TABLE.search(name):
            yield len(each.weight) - getattr(each, "offset", 0)
    for name, buffer in module.named_buffers():
        if isinstance(buffer, Tensor) and buffer.ndim > 1 and TABLE.search(name):
            yield len(buffer)


def trained_positions(config: Any) -> int | None:
    """Return the number of positions that the model of `config` was made for, scaled ones too; None if unknown."""
    text = config.get_text_config()
    own: int | None = getattr(text, "max_position_embeddings", None)
    if not own:
        return None
    rotary = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    by_layer = [each for each in rotary.values() if isinstance(each, Mapping)] or [rotary]
    return max(own, *(_scaled(each, own) for each in by_layer))


def _scaled(rotary: Mapping[str, Any], own: int) -> int:
    """Return the positions that a scaled rotary embedding reaches."""
    factor, original = rotary.get("factor"), rotary.get("original_max_position_embeddings")
    return int((factor or 1) * (original or own))
