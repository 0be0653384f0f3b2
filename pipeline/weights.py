"""Weights in shared memory: which tensors there are, and two buffers between which a reader never sees a mixture.

The publisher writes one buffer while readers read the other. A reader copies, then looks whether the publisher began
to write over what it copied; if so, it copies anew. No lock, so there is nothing that a killed process could hold.
Knows bytes, dtypes by name and numpy; a torch tensor is looked at by functions that import torch when they meet one.

Layout: one page of signed 64-bit words, the list of tensors as msgpack, the two buffers; each begins on a page.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..schemas import Array, ProtocolMismatch
from ..schemas.errors import UNREADABLE
from .errors import WeightsMismatch
from .shared_memory import allocate, may_shrink

if TYPE_CHECKING:
    import torch

__all__ = ["NO_VERSION", "Tensor", "TensorSpec", "WeightReader", "WeightWriter", "check_weights", "specs_of"]

Tensor: TypeAlias = "Array | torch.Tensor"
"""Weights are given as numpy arrays or as torch tensors, on any device."""

NO_VERSION = -1
"""The version of weights that were never published."""

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
"""The dtypes that travel, by the name that numpy and torch give them."""

ALIGNMENT = 64
"""Bytes: every tensor begins on a cache line."""

CHUNK_BYTES = 4 * 2**20
"""What a reader copies before it looks whether the publisher has overtaken it."""

ATTEMPTS = 32
"""How often a reader starts over. It starts over at the moment a new version is complete and then has as long as the
publisher needs for the next two, so the second attempt succeeds unless the machine stalls the reader."""

SEQUENCE, LATEST, BEGUN, VERSION = 0, 1, 2, 4
"""Words of the first page: publications so far; the newest version; for each of the two buffers, the publication that
was last begun in it, and its version."""


class TensorSpec(NamedTuple):
    """What a tensor is, as told to another process."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor occupies."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def specs_of(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """What `tensors` (a `state_dict`, say) are. Tied tensors are listed under each of their names.

    >>> specs_of({"bias": np.zeros(3, np.float32)})
    (TensorSpec(name='bias', dtype='float32', shape=(3,)),)

    Raises:
        TypeError: a value is no tensor, or has a dtype that does not travel.
    """
    return tuple(_spec_of(name, tensor) for name, tensor in tensors.items())


def _spec_of(name: str, tensor: Tensor) -> TensorSpec:
    dtype = str(getattr(tensor, "dtype", "")).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        raise TypeError(f"{name}: expected a tensor of {', '.join(ITEM_BYTES)}, got {type(tensor).__name__} {dtype}")
    return TensorSpec(name, dtype, tuple(tensor.shape))


def check_weights(expected: Iterable[TensorSpec], found: Iterable[TensorSpec], whose: str) -> None:
    """Hold the tensors that were found to those that were expected: names, dtypes, shapes. Nothing is ever cast.

    Raises:
        WeightsMismatch: listing every tensor that is missing, extra or different, with expected and found.
    """
    wanted, given = ({spec.name: spec for spec in specs} for specs in (expected, found))
    lines = [
        f"{name}: expected {wanted.get(name, 'no such tensor')}, found {given.get(name, 'none')}"
        for name in dict.fromkeys([*wanted, *given])
        if wanted.get(name) != given.get(name)
    ]
    if lines:
        raise WeightsMismatch(f"{whose}: {len(lines)} tensors differ\n  " + "\n  ".join(lines))


class _Place(NamedTuple):
    """Where a tensor lies within a buffer."""

    spec: TensorSpec
    offset: int


class _Plan:
    """How a segment is cut: where the two buffers lie in it, and where the tensors lie in a buffer."""

    def __init__(self, specs: Iterable[TensorSpec], manifest_bytes: int) -> None:
        self.places: list[_Place] = []
        offset = 0
        for spec in specs:
            self.places.append(_Place(spec, offset))
            offset += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
        self.first = _end_of_manifest(manifest_bytes)
        """Where the first buffer begins."""
        self.buffer_bytes = _pages(max(offset, 1))
        self.nbytes = self.first + 2 * self.buffer_bytes
        """Bytes of the segment: the weights twice, and a little."""

    def cut(self, memory: memoryview) -> tuple[memoryview, list[NDArray[np.uint8]]]:
        """The words and the two buffers of a segment that is mapped as `memory`."""
        whole: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        buffers = [whole[self.first + at * self.buffer_bytes :][: self.buffer_bytes] for at in (0, 1)]
        return memory[: mmap.PAGESIZE].cast("q"), buffers


def _end_of_manifest(manifest_bytes: int) -> int:
    return mmap.PAGESIZE + _pages(manifest_bytes)


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class _Fence:
    """Keeps the processor from moving stores and loads across it: a lock given back and taken again does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def __call__(self) -> None:
        self._lock.release()
        self._lock.acquire()


class WeightWriter:
    """The publisher's side. Blocks while it allocates and while it writes: use it in a worker thread."""

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        """Allocate both buffers.

        Raises:
            OutOfSharedMemory: the machine has no room for them.
        """
        self.specs = tuple(specs)
        manifest = msgspec.msgpack.encode(self.specs)
        self.manifest_bytes = len(manifest)
        self._plan = _Plan(self.specs, len(manifest))
        self.nbytes = self._plan.nbytes
        """Bytes of the segment."""
        purpose = f"{len(self.specs)} tensors, twice"
        self.fd = allocate(self.nbytes, purpose, "free memory, or publish a smaller model")
        """To be handed to readers; open until `close`."""
        memory = memoryview(mmap.mmap(self.fd, self.nbytes))
        memory[mmap.PAGESIZE : mmap.PAGESIZE + len(manifest)] = manifest
        self._words, self._buffers = self._plan.cut(memory)
        self._words[LATEST] = NO_VERSION
        self._fence = _Fence()

    @property
    def latest(self) -> int:
        """The newest version that was published; −1 before the first."""
        return self._words[LATEST]

    def write(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Copy `tensors` into the buffer that nobody was pointed to, and point everyone to it.

        Interrupted at any instruction, it leaves what was published before.

        Raises:
            WeightsMismatch: the tensors are not those that the segment was made for.
            ValueError: `version` is not newer than the last.
        """
        check_weights(self.specs, specs_of(tensors), "weights to publish")
        if version <= self.latest:
            raise ValueError(f"expected a version above {self.latest}, got {version}")
        sequence = self._words[SEQUENCE] + 1
        at = sequence % 2
        self._words[BEGUN + at] = sequence
        self._fence()
        for spec, offset in self._plan.places:
            self._buffers[at][offset : offset + spec.nbytes] = _bytes_of(tensors[spec.name])
        self._words[VERSION + at] = version
        self._fence()
        self._words[SEQUENCE] = sequence
        self._fence()
        self._words[LATEST] = version

    def close(self) -> None:
        """Close the descriptor. Readers keep their mappings; the memory is freed with the last of them."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class WeightReader:
    """A subscriber's side: a read-only mapping of a segment that was handed over. Blocks while it maps and reads."""

    def __init__(self, fd: int, nbytes: int, manifest_bytes: int) -> None:
        """Map the segment; `fd` stays the caller's.

        Raises:
            ProtocolMismatch: it is no segment of weights of that size, or could shrink under the reader.
        """
        size, loose = os.fstat(fd).st_size, may_shrink(fd)
        if size != nbytes or loose:
            can = "can" if loose else "cannot"
            raise ProtocolMismatch(f"expected {nbytes} bytes of weights that cannot shrink, got {size} that {can}")
        if _end_of_manifest(manifest_bytes) > size:
            raise ProtocolMismatch(f"expected a list of tensors within {size} bytes, got one of {manifest_bytes}")
        memory = memoryview(mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ))
        self.specs = _decode_specs(memory[mmap.PAGESIZE : mmap.PAGESIZE + manifest_bytes])
        """What is published, in the publisher's order."""
        self._plan = plan = _Plan(self.specs, manifest_bytes)
        if plan.nbytes != nbytes:
            raise ProtocolMismatch(f"expected two buffers of {plan.buffer_bytes} bytes from {plan.first}, got {nbytes}")
        self._words, self._buffers = plan.cut(memory)
        self._fence = _Fence()

    @property
    def latest(self) -> int:
        """The newest version that was published; −1 before the first. A look into memory, no system call."""
        return self._words[LATEST]

    def private_copy(self) -> NDArray[np.uint8]:
        """Memory for one version, for `read_into`."""
        return np.zeros(self._plan.buffer_bytes, np.uint8)

    def read_into(self, memory: NDArray[np.uint8]) -> int:
        """Copy the newest version, whole, and return it; −1 if there is none yet or the publisher never let it finish.

        In the latter case `memory` holds no version.
        """
        for _ in range(ATTEMPTS):
            sequence = self._words[SEQUENCE]
            if sequence == 0:
                break
            self._fence()
            version = self._words[VERSION + sequence % 2]
            if self._copied(memory, sequence):
                return version
        return NO_VERSION

    def _copied(self, memory: NDArray[np.uint8], sequence: int) -> bool:
        at = sequence % 2
        for start in range(0, self._plan.buffer_bytes, CHUNK_BYTES):
            memory[start : start + CHUNK_BYTES] = self._buffers[at][start : start + CHUNK_BYTES]
            self._fence()
            if self._words[BEGUN + at] != sequence:
                return False
        return True

    def load(self, memory: NDArray[np.uint8], tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors that lie in `memory` into `tensors`, in place; their specs were checked before."""
        for spec, offset in self._plan.places:
            if spec.nbytes:
                _fill(tensors[spec.name], memory[offset : offset + spec.nbytes], spec)


_spec_decoder = msgspec.msgpack.Decoder(tuple[TensorSpec, ...])


def _decode_specs(encoded: memoryview) -> tuple[TensorSpec, ...]:
    try:
        specs: tuple[TensorSpec, ...] = _spec_decoder.decode(encoded)
    except UNREADABLE as error:
        raise ProtocolMismatch(f"expected a list of (name, dtype, shape), got {error}") from None
    for spec in specs:
        if spec.dtype not in ITEM_BYTES or min(spec.shape, default=0) < 0:
            raise ProtocolMismatch(f"{spec.name}: expected a dtype among {sorted(ITEM_BYTES)}, got {spec}")
    return specs


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """The tensor's elements in C order as bytes; a view where it is contiguous and in this machine's memory."""
    if isinstance(tensor, np.ndarray):
        flat: Array = np.ascontiguousarray(tensor).reshape(-1)
        return flat.view(np.uint8)
    return _torch_bytes(tensor)


def _torch_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    import torch  # noqa: PLC0415 (only whoever holds a torch tensor pays for torch)

    return np.asarray(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy(), np.uint8)


def _fill(tensor: Tensor, elements: NDArray[np.uint8], spec: TensorSpec) -> None:
    if isinstance(tensor, np.ndarray):
        tensor[...] = elements.view(tensor.dtype).reshape(tensor.shape)
    else:
        _torch_fill(tensor, elements, spec)


def _torch_fill(tensor: torch.Tensor, elements: NDArray[np.uint8], spec: TensorSpec) -> None:
    import torch  # noqa: PLC0415 (only whoever holds a torch tensor pays for torch)

    dtype: Any = getattr(torch, spec.dtype)
    with torch.no_grad():
        tensor.copy_(torch.frombuffer(elements, dtype=dtype).reshape(spec.shape))
