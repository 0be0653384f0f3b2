"""The tensors of a model in a safetensors file, as transformers writes them: tied ones once, under their first name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..._pipeline.errors import WeightsDamaged
from ..._pipeline.weights.weight_specs import specs_of
from ..._schemas.conversion import decode_json

TIED = "tied"
"""Key of the file's metadata: the first name of each tensor that has a second one, by that one."""


def write_weights(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write `tensors`, a `state_dict`, to `path`."""
    tied = {spec.name: spec.tied for spec in specs_of(tensors) if spec.tied}
    metadata = {"format": "pt", TIED: msgspec.json.encode(tied).decode()}
    save_file(_unshared({name: tensor for name, tensor in tensors.items() if name not in tied}), path, metadata)


def read_weights(path: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Return the tensors in `path`, tied ones under each of their names.

    Raises:
        OSError: it cannot be read.
    """
    tensors = load_file(path, device=str(device))
    with safe_open(path, framework="pt") as file:
        tied = decode_json((file.metadata() or {}).get(TIED, "{}"), dict[str, str])
    return tensors | {name: tensors[first] for name, first in tied.items()}


def read_folder(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of all safetensors files in `folder`, written by another program, by name.

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


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as safetensors needs them: contiguous, each in its own memory."""
    seen: set[int] = set()
    unshared: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        unshared[name] = tensor.clone() if memory in seen else tensor.contiguous()
        seen.add(memory)
    return unshared
