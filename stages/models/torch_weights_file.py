"""The tensors of a model in a safetensors file, as transformers reads them: tied ones once, under their first name.

They are written and read one by one: those of a model that ranks share are together larger than a rank's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from ..._pipeline.errors import WeightsDamaged
from ..._pipeline.weights.tensor_file import contents_of
from ..._pipeline.weights.tensor_layout import DTYPE_NAMES, WritePlan, ties_of
from ..._pipeline.weights.weight_specs import LazyTensors, TensorManifest, TensorSpec, specs_of
from ..._schemas.conversion import decode_json

TIED = "tied"
"""Key of the metadata of older files: the first name of each tensor that has a second one, by that one."""


def write_weights(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write `tensors`, for example a `state_dict`, to `path`, one after the other."""
    plan = WritePlan(TensorManifest(specs_of(tensors)))
    with path.open("wb") as file:
        for content in contents_of(tensors, plan):
            file.write(content)


def stored_weights(path: Path) -> LazyTensors:
    """Return the tensors in `path`, tied ones under each of their names; each is read when it is asked for.

    They are views of the file's pages, which stay in memory no longer than the tensor: it may only be read.

    Raises:
        OSError: it cannot be read.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        specs = {name: _spec_of(name, file.get_slice(name)) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    tied = ties_of(metadata) | decode_json(metadata.get(TIED, "{}"), dict[str, str])
    specs |= {name: specs[first]._replace(name=name, tied=first) for name, first in tied.items()}

    def read(name: str) -> Tensor:
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(tied.get(name, name))
        return tensor

    return LazyTensors(specs.values(), read)


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


def _spec_of(name: str, stored: Any) -> TensorSpec:
    return TensorSpec(name, DTYPE_NAMES[stored.get_dtype()], tuple(stored.get_shape()))
