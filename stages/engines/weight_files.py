"""Refuse a folder of weights that no server could load, before a server is told of it.

Reads the headers of safetensors files, and nothing else. Knows neither models nor servers.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..._pipeline.errors import EngineRefused
from ..._pipeline.policy.tensor_layout import LENGTH, TensorEntry, header_bytes, parse_header

__all__ = ["check_weight_files"]


class _Index(msgspec.Struct):
    """Of weights in several files: the file of each tensor."""

    weight_map: dict[str, str]


def check_weight_files(folder: Path) -> None:
    """Make sure that the safetensors files in `folder` are all there and whole. Blocks.

    A folder that is not seen here is left to the server, which may be on another host.

    Raises:
        EngineRefused: there are none, one is cut off or is no safetensors file, or one that an index names is missing.
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
                    f"expected {tensor} in {folder / name}, as {path.name} says, got none: write it anew"
                )


def _tensors_in(path: Path) -> dict[str, TensorEntry]:
    """Return the entries of a file, all of whose tensors are there."""
    nbytes = path.stat().st_size
    with path.open("rb") as file:
        try:
            header = file.read(header_bytes(file.read(LENGTH.size), nbytes))
        except ValueError:
            raise EngineRefused(
                f"expected a whole safetensors file, got {path} of {nbytes} bytes: write it anew"
            ) from None
    try:
        tensors, _ = parse_header(header)
    except ValueError as error:
        raise EngineRefused(f"expected a safetensors file, got {path}: {error}") from None
    whole = LENGTH.size + len(header) + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if whole != nbytes:
        raise EngineRefused(f"expected {whole} bytes in {path}, as its header says, got {nbytes}: write it anew")
    return tensors


def _index_in(path: Path) -> _Index:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Index)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise EngineRefused(f"expected an index of safetensors files, got {path}: {error}") from None
