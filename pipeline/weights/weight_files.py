"""Reject a folder of weights that no server could load, before a request to load it.

Reads only the headers of safetensors files. Knows neither models nor servers.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..._schemas.conversion import decode_json
from ..errors import EngineRefused
from .tensor_layout import LENGTH, TensorEntry, header_bytes, parse_header


class _Index(msgspec.Struct):
    """The index of weights in several files: the file of each tensor."""

    weight_map: dict[str, str]


def check_weight_files(folder: Path) -> None:
    """Check that the safetensors files in `folder` are complete. Blocks.

    A folder that does not exist on this host is not checked: the server may be on another.

    Raises:
        EngineRefused: there is no file, one is cut off or no safetensors file, or one that an index names is missing.
    """
    if not folder.is_dir():
        return
    try:
        files = {path.name: _tensors_in(path) for path in sorted(folder.glob("*.safetensors"))}
    except OSError as error:
        raise EngineRefused(f"expected weights that can be read, got {folder}: {error}") from error
    if not files:
        raise EngineRefused(f"expected *.safetensors in {folder}, got {sorted(path.name for path in folder.iterdir())}")
    for path in folder.glob("*.safetensors.index.json"):
        for tensor, name in _index_in(path).weight_map.items():
            if tensor not in files.get(name, {}):
                raise EngineRefused(
                    f"expected {tensor} in {folder / name}, according to {path.name}, got none: write it again"
                )


def _tensors_in(path: Path) -> dict[str, TensorEntry]:
    """Return the entries of a file, after checking that all its tensors are in it."""
    nbytes = path.stat().st_size
    with path.open("rb") as file:
        try:
            header = file.read(header_bytes(file.read(LENGTH.size), nbytes))
        except ValueError:
            raise EngineRefused(
                f"expected a whole safetensors file, got {path} of {nbytes} bytes: write it again"
            ) from None
    try:
        tensors, _ = parse_header(header)
    except ValueError as error:
        raise EngineRefused(f"expected a safetensors file, got {path}: {error}") from None
    whole = LENGTH.size + len(header) + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if whole != nbytes:
        raise EngineRefused(f"expected {whole} bytes in {path}, according to its header, got {nbytes}: write it again")
    return tensors


def _index_in(path: Path) -> _Index:
    try:
        return decode_json(path.read_bytes(), _Index)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise EngineRefused(f"expected an index of safetensors files, got {path}: {error}") from None
