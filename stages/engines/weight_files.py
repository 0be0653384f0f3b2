"""Refuse a folder of weights that no server could load, before a server is told of it.

Reads the headers of safetensors files, and nothing else. Knows neither models nor servers.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgspec

from ...pipeline.errors import EngineRefused

__all__ = ["check_weight_files"]

_LENGTH = struct.Struct("<Q")
"""Stands first in a safetensors file: the bytes of the JSON header that follows."""

MAX_HEADER_BYTES = 100_000_000
"""As safetensors itself has it."""


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int]
    """Its first byte behind the header, and one behind its last."""


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


def _tensors_in(path: Path) -> dict[str, _Tensor]:
    """Return what a file says is in it, all of which is there."""
    nbytes = path.stat().st_size
    with path.open("rb") as file:
        begin = file.read(_LENGTH.size)
        length = _LENGTH.unpack(begin)[0] if len(begin) == _LENGTH.size else nbytes
        if length > min(MAX_HEADER_BYTES, nbytes - _LENGTH.size):
            raise EngineRefused(f"expected a whole safetensors file, got {path} of {nbytes} bytes: write it anew")
        header = file.read(length)
    try:
        told = msgspec.json.decode(header, type=dict[str, Any])
        told.pop("__metadata__", None)
        tensors = msgspec.convert(told, dict[str, _Tensor])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise EngineRefused(f"expected a safetensors file, got {path}: {error}") from None
    whole = _LENGTH.size + length + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if whole != nbytes:
        raise EngineRefused(f"expected {whole} bytes in {path}, as its header says, got {nbytes}: write it anew")
    return tensors


def _index_in(path: Path) -> _Index:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Index)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise EngineRefused(f"expected an index of safetensors files, got {path}: {error}") from None
