"""Tensors in a folder that a foreign trainer has written, as transformers names and stores them."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..._pipeline.errors import WeightsDamaged


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of all safetensors files in `folder`, by name, on the CPU. Blocks.

    Raises:
        WeightsDamaged: a file cannot be read.
    """
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            tensors |= load_file(path)
        except SafetensorError as error:
            raise WeightsDamaged(f"expected weights that can be read, got {path}: {error}") from error
    return tensors
