"""Packed rows of sequences, and the logits of transformers for each sequence alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from penstock.torch import Attention


@torch.inference_mode()
def logits_of_transformers(folder: Path, tokens: Tensor) -> Tensor:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    logits: Tensor = model(tokens[None], use_cache=False).logits[0]
    return logits


def packed_rows(*rows: list[Tensor]) -> tuple[Tensor, Tensor, Attention]:
    """Return tokens, positions and attention of rows of several sequences, padded on the right."""
    starts = list[int]()
    width = max(sum(map(len, row)) for row in rows)
    tokens, positions, sequences = (torch.full((len(rows), width), fill) for fill in (0, 0, -1))
    for index, row in enumerate(rows):
        start = 0
        for number, sequence in enumerate(row):
            part = slice(start, start := start + len(sequence))
            starts.append(index * width + part.start)
            tokens[index, part], positions[index, part] = sequence, torch.arange(len(sequence))
            sequences[index, part] = number
        starts.append(index * width + start)
    alone = all(len(row) == 1 for row in rows)
    cu_seqlens = torch.tensor(sorted({*starts, len(rows) * width}), dtype=torch.int32)
    return tokens, positions, Attention.packed(sequences, one_sequence=alone, cu_seqlens=cu_seqlens)
