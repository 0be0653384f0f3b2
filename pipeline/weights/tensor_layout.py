"""The layout of published tensors: that of a safetensors file, in shared memory, on a device and in a folder.

A header describes the tensors (names, dtypes, shapes, byte offsets); their bytes follow, in C order and without gaps.
Tensors are ordered by alignment, so that each whose bytes fill whole cache lines begins on one, and every other one at
a multiple of its element size. Tied tensors are stored once; safetensors knows no ties, so they are in the metadata.

    length of the header, uint64 little-endian · header, JSON padded with spaces · bytes of the tensors
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from ..._schemas.conversion import convert, decode_json
from ..._schemas.errors import UNREADABLE
from ..errors import InvalidConfig
from .weight_specs import (
    DTYPES,
    FusedTensor,
    Part,
    TableSpec,
    Tensor,
    TensorManifest,
    TensorSpec,
    cast_specs,
    fitted,
    packed,
    specs_of,
)

LENGTH = struct.Struct("<Q")
"""The first bytes of a safetensors file: the length of the JSON header behind them."""

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""

EXTENSION = "penstock"
"""Key of the metadata for what safetensors has no field for."""

ALIGNMENT = 64
"""Bytes of a cache line."""

DTYPE_NAMES = {dtype.code: name for name, dtype in DTYPES.items()}
"""The dtypes that can be published, by their names in a safetensors file."""


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
    """Its first byte behind the header, and one behind its last."""


class _Extension(msgspec.Struct, frozen=True):
    """Metadata that safetensors has no field for."""

    tied: dict[str, str]
    """The name of the tensor in the file, by each other name of it."""
    tables: tuple[TableSpec, ...] | None


def header_bytes(begin: bytes | memoryview, nbytes: int) -> int:
    """Return the length of the header that follows `begin`, the first eight bytes of `nbytes`.

    Raises:
        ValueError: the header would be longer than the rest.
    """
    length: int = LENGTH.unpack(begin)[0] if len(begin) == LENGTH.size else nbytes
    if length > min(MAX_HEADER_BYTES, nbytes - LENGTH.size):
        raise ValueError(f"expected a header within {nbytes} bytes, got one of {length}")
    return length


def parse_header(header: bytes | memoryview) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return the entries of a safetensors header by name, and its metadata.

    Raises:
        ValueError: it is not one.
    """
    try:
        fields = decode_json(header, dict[str, Any])
        metadata = convert(fields.pop("__metadata__", {}), dict[str, str])
        return convert(fields, dict[str, TensorEntry]), metadata
    except UNREADABLE as error:
        raise ValueError(str(error)) from None


def ties_of(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the name of the tensor in a file, by each other name of it; none in a file of another writer.

    Raises:
        ValueError: the metadata is not what was written.
    """
    return _extension_of(metadata).tied if EXTENSION in metadata else {}


class TensorLayout:
    """The tensors of a version, and the position of each among their bytes.

    >>> specs = [TensorSpec("bias", "float32", (3,)), TensorSpec("weight", "float32", (16, 4))]
    >>> TensorLayout(TensorManifest(specs)).offsets
    {'weight': 0, 'bias': 256}
    """

    def __init__(self, manifest: TensorManifest) -> None:
        """Place the tensors of `manifest`."""
        self.manifest = manifest
        self.nbytes = 0
        """Bytes of all tensors."""
        self.offsets: dict[str, int] = {}
        """The first byte of each tensor, behind the header."""
        stored = [spec for spec in manifest.tensors if not spec.tied]
        for spec in sorted(stored, key=_alignment, reverse=True):
            self.offsets[spec.name] = self.nbytes
            self.nbytes += spec.nbytes
        self._entries = {spec.name: self._entry(spec) for spec in stored}
        self._tied = {spec.name: spec.tied for spec in manifest.tensors if spec.tied}
        self.offsets |= {name: self.offsets[tied] for name, tied in self._tied.items()}
        self.header = self._encoded()
        """The header with its length."""

    @classmethod
    def parse(cls, header: bytes | memoryview) -> TensorLayout:
        """Return the layout that a JSON header describes.

        Raises:
            ValueError: it is not a header of published tensors.
        """
        entries, metadata = parse_header(header)
        extension = _extension_of(metadata)
        layout = cls(TensorManifest((*_specs(entries, extension.tied),), extension.tables))
        if layout._entries != entries:
            raise ValueError("expected tensors without gaps, ordered by alignment, got other offsets")
        return layout

    def offset(self, part: Part) -> int:
        """Return the first byte of `part`, behind the header."""
        return self.offsets[part.whole] + part.offset

    def _entry(self, spec: TensorSpec) -> TensorEntry:
        start = self.offsets[spec.name]
        return TensorEntry(DTYPES[spec.dtype].code, spec.shape, (start, start + spec.nbytes))

    def _encoded(self) -> bytes:
        """Return the header, padded so that the tensors' bytes begin on a cache line of the file."""
        extension = msgspec.json.encode(_Extension(self._tied, self.manifest.tables)).decode()
        metadata = {"__metadata__": {"format": "pt", EXTENSION: extension}}
        header = msgspec.json.encode(metadata | self._entries)
        padded = -(-(LENGTH.size + len(header)) // ALIGNMENT) * ALIGNMENT - LENGTH.size
        return LENGTH.pack(padded) + header.ljust(padded)


class WritePlan:
    """The tensors that are given at every publication, and the position of each in the published layout."""

    def __init__(
        self,
        given: TensorManifest,
        fused: Iterable[FusedTensor] = (),
        cast: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Plan for tensors as in `given`.

        Raises:
            WeightsMismatch: `fused` names tensors that are absent or do not go together.
            InvalidConfig: `cast` names a dtype that cannot be published.
        """
        self._given = given.tensors
        specs, parts = packed(cast_specs(given.tensors, cast), fused, "weights to publish")
        self.layout = TensorLayout(TensorManifest(specs, given.tables))
        self._parts = sorted((part for part in parts if not part.spec.tied), key=self.layout.offset)

    @property
    def ties(self) -> dict[str, str]:
        """Return the earlier tensor that each tied one is tied to."""
        return {spec.name: spec.tied for spec in self._given if spec.tied}

    def check(self, tensors: Mapping[str, Tensor], version: int, *, newest: int) -> None:
        """Raise if `tensors` cannot be published as `version` after `newest`.

        Raises:
            WeightsMismatch: the tensors are not those that were planned for.
            InvalidConfig: `version` is not above `newest`.
        """
        fitted(self._given, specs_of(tensors), (), "weights to publish")
        if version <= newest:
            raise InvalidConfig(f"version: expected one above {newest}, got {version}")

    def pieces(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, Tensor, TensorSpec]]:
        """Yield the offset of each tensor, the tensor, and its published dtype and shape: in order, without gaps."""
        for part in self._parts:
            yield self.layout.offset(part), tensors[part.spec.name], part.spec


def _alignment(spec: TensorSpec) -> int:
    return math.gcd(spec.nbytes, ALIGNMENT)


def _extension_of(metadata: Mapping[str, str]) -> _Extension:
    try:
        return decode_json(metadata.get(EXTENSION, "{}"), _Extension)
    except UNREADABLE as error:
        raise ValueError(str(error)) from None


def _specs(entries: Mapping[str, TensorEntry], tied: Mapping[str, str]) -> Iterator[TensorSpec]:
    for name, entry in entries.items():
        if entry.dtype not in DTYPE_NAMES or min(entry.shape, default=0) < 0:
            raise ValueError(f"{name}: expected a shape, and a dtype among {sorted(DTYPE_NAMES)}, got {entry}")
        yield TensorSpec(name, DTYPE_NAMES[entry.dtype], entry.shape)
    for name, first in tied.items():
        if name in entries or first not in entries:
            raise ValueError(f"{name}: expected another name of a tensor, got one of {first}")
        yield TensorSpec(name, DTYPE_NAMES[entries[first].dtype], entries[first].shape, first)
