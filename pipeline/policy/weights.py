"""Weights in shared memory: two buffers, between which a reader never sees a mixture.

The publisher writes one buffer while the other is read. Whoever copies, copies and then looks whether the publisher
began to write over it; if so, it copies anew. Whoever samples from the buffer itself looks before each token. No lock,
so there is nothing that a killed process could hold.

Layout: one page of signed 64-bit words, the lists of tensors and tables as msgpack, the two buffers; each begins on a
page. The buffers may lie on a device instead, behind a page of their own.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from ...schemas import ProtocolMismatch
from ...schemas.control import DeviceHandle
from ...schemas.errors import UNREADABLE
from ..channels.shared_memory import allocate, may_shrink
from ..errors import OutOfSharedMemory, StaleHandle
from .device_memory import DeviceMemory
from .weight_memory import HostMemory, VersionMemory
from .weight_specs import (
    ITEM_BYTES,
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

__all__ = ["NO_VERSION", "Publication", "WeightReader", "WeightWriter"]

NO_VERSION = -1
"""The version of weights that were never published."""

LOOKS = 32
"""How often a reader looks anew for the newest version: a second time only where it was stalled for a whole one."""

ALIGNMENT = 64
"""Bytes: every tensor begins on a cache line."""

SEQUENCE, LATEST, BEGUN, VERSION, GENERATION = 0, 1, 2, 4, 6
"""Words of the first page: publications so far; the newest version; for each of the two buffers, the publication that
was last begun in it, and its version; which publisher's segment it is. A device's page has only the last."""


class Publication(NamedTuple):
    """A version that was published."""

    sequence: int
    """Which publication it was, counted from 1; it lies in buffer `sequence % 2`."""
    version: int


class _Plan:
    """How memory is cut: where the two buffers lie in it, and where the tensors lie in a buffer."""

    def __init__(self, specs: Iterable[TensorSpec], first: int) -> None:
        self.offsets: dict[str, int] = {}
        end = 0
        for spec in specs:
            self.offsets[spec.name] = self.offsets[spec.tied] if spec.tied else end
            end += 0 if spec.tied else -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
        self.first = first
        """Where the first buffer begins."""
        self.buffer_bytes = _pages(max(end, 1))
        self.nbytes = self.first + 2 * self.buffer_bytes
        """Bytes of the memory: the weights twice, and a little."""

    def start(self, sequence: int, part: Part | None = None) -> int:
        """Where the buffer of publication `sequence` begins, or a tensor in it."""
        inside = 0 if part is None else self.offsets[part.whole] + part.offset
        return self.first + sequence % 2 * self.buffer_bytes + inside


def _end_of_manifest(manifest_bytes: int) -> int:
    return mmap.PAGESIZE + _pages(manifest_bytes)


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _fence() -> None:
    """Keep the processor from moving stores and loads across: a lock that is given back and taken again does.

    A lock of one's own, for the thread that samples and the event loop's look at the same time.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


class WeightWriter:
    """The publisher's side. Blocks while it allocates and while it writes: use it in a worker thread."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        *,
        fused: Iterable[FusedTensor] = (),
        cast: Mapping[str, str] = MappingProxyType({}),
        device: str = "cpu",
        tables: tuple[TableSpec, ...] | None = None,
    ) -> None:
        """Allocate both buffers; `tables` are those of the model whose tensors `specs` are, where they are known.

        Raises:
            OutOfSharedMemory: the machine has no room for them.
            WeightsMismatch: `fused` names tensors that are absent or do not go together.
            NoDevice: there is no such device.
            ValueError: `cast` names a dtype that does not travel.
        """
        self._given = tuple(specs)
        self.specs, self._parts = packed(cast_specs(specs, cast), fused, "weights to publish")
        """What is published."""
        self.generation = secrets.randbits(63)
        manifest = msgspec.msgpack.encode(TensorManifest(self.specs, tables))
        self.manifest_bytes = len(manifest)
        first = _end_of_manifest(len(manifest))
        self.nbytes = _Plan(self.specs, first).nbytes if device == "cpu" else first
        """Bytes of the segment."""
        purpose = f"{len(self.specs)} tensors, twice"
        self.fd = allocate(self.nbytes, purpose, "free memory, or publish a smaller model")
        """To be handed to readers; open until `close`."""
        try:
            memory = memoryview(mmap.mmap(self.fd, self.nbytes))
        except OSError as error:
            os.close(self.fd)
            raise OutOfSharedMemory(
                f"expected to map {self.nbytes} bytes of shared memory for {purpose}, got none ({error.strerror}): "
                f"raise the limit of address space (ulimit -v), or publish a smaller model"
            ) from error
        memory[mmap.PAGESIZE : mmap.PAGESIZE + len(manifest)] = manifest
        self._words = memory[: mmap.PAGESIZE].cast("q")
        self._words[LATEST], self._words[GENERATION] = NO_VERSION, self.generation
        self.handle: DeviceHandle | None = None
        """Where the buffers are, if not in the segment."""
        self._memory: VersionMemory = HostMemory(memory)
        self._plan = _Plan(self.specs, first if device == "cpu" else mmap.PAGESIZE)
        if device != "cpu":
            self._move_to(device)

    def _move_to(self, device: str) -> None:
        try:
            memory = DeviceMemory.allocate(device, self._plan.nbytes)
        except BaseException:
            self.close()
            raise
        memory.mark(self.generation)
        self._memory, self.handle = memory, memory.handle

    @property
    def latest(self) -> int:
        """The newest version that was published; −1 before the first."""
        return self._words[LATEST]

    @property
    def sequence(self) -> int:
        """Publications so far."""
        return self._words[SEQUENCE]

    def check(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Refuse what cannot be written.

        Raises:
            WeightsMismatch: the tensors are not those that the segment was made for.
            ValueError: `version` is not newer than the last.
        """
        fitted(self._given, specs_of(tensors), (), "weights to publish")
        if version <= self.latest:
            raise ValueError(f"expected a version above {self.latest}, got {version}")

    def write(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Copy `tensors`, which were checked, into the buffer that nobody was pointed to, and point everyone to it.

        Interrupted at any instruction, it leaves what was published before.
        """
        sequence = self.sequence + 1
        at = sequence % 2
        self._words[BEGUN + at] = sequence
        _fence()
        for part in self._parts:
            if not part.spec.tied:
                self._memory.store(self._plan.start(sequence, part), tensors[part.spec.name], part.spec)
        self._memory.flush()
        self._words[VERSION + at] = version
        _fence()
        self._words[SEQUENCE] = sequence
        _fence()
        self._words[LATEST] = version

    def close(self) -> None:
        """Close the descriptor. Readers keep their mappings; the memory is freed with the last of them."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if isinstance(self._memory, DeviceMemory):
            self._memory.close()


class WeightReader:
    """A subscriber's side: a read-only mapping of a segment that was handed over. Blocks while it maps and reads."""

    def __init__(
        self, fd: int, nbytes: int, manifest_bytes: int, generation: int, handle: DeviceHandle | None = None
    ) -> None:
        """Map the segment; `fd` stays the caller's.

        Raises:
            ProtocolMismatch: it is no segment of weights of that size, or could shrink under the reader.
            StaleHandle: it is a segment of another publisher, or `handle` leads to memory of another.
        """
        size, loose = os.fstat(fd).st_size, may_shrink(fd)
        if size != nbytes or loose:
            can = "can" if loose else "cannot"
            raise ProtocolMismatch(f"expected {nbytes} bytes of weights that cannot shrink, got {size} that {can}")
        first = _end_of_manifest(manifest_bytes)
        if first > size:
            raise ProtocolMismatch(f"expected a list of tensors within {size} bytes, got one of {manifest_bytes}")
        memory = memoryview(mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ))
        self._words = memory[: mmap.PAGESIZE].cast("q")
        _check_generation(self._words[GENERATION], generation)
        self.inventory = _decoded(memory[mmap.PAGESIZE : mmap.PAGESIZE + manifest_bytes])
        """What is published, in the publisher's order."""
        self._plan = _Plan(self.inventory.tensors, first if handle is None else mmap.PAGESIZE)
        have = nbytes if handle is None else handle.nbytes
        self.memory = HostMemory(memory) if handle is None else _opened(handle, generation)
        """Where the versions lie."""
        if self._plan.nbytes != have:
            raise ProtocolMismatch(
                f"expected two buffers of {self._plan.buffer_bytes} bytes from {self._plan.first}, got {have}"
            )

    @property
    def latest(self) -> int:
        """The newest version that was published; −1 before the first. A look into memory, no system call."""
        return self._words[LATEST]

    def newest(self) -> Publication | None:
        """The newest version and where it lies. A look into memory.

        None before the first, and where two publications came between every two words that were read.
        """
        for _ in range(LOOKS):
            if not (sequence := self._words[SEQUENCE]):
                break
            _fence()
            version = self._words[VERSION + sequence % 2]
            _fence()
            if self._words[BEGUN + sequence % 2] == sequence:  # else it may be the next version in this buffer
                return Publication(sequence, version)
        return None

    def intact(self, sequence: int) -> bool:
        """Whether nothing was written over publication `sequence` so far: what was read of it until now is right."""
        _fence()
        return self._words[BEGUN + sequence % 2] == sequence

    @property
    def buffer_bytes(self) -> int:
        """Bytes of one version."""
        return self._plan.buffer_bytes

    def start(self, sequence: int, part: Part | None = None) -> int:
        """Where publication `sequence` begins in `memory`, or a tensor of it."""
        return self._plan.start(sequence, part)


def _opened(handle: DeviceHandle, generation: int) -> DeviceMemory:
    memory = DeviceMemory.open(handle)
    _check_generation(memory.marked(), generation)
    return memory


def _check_generation(found: int, expected: int) -> None:
    if found != expected:
        raise StaleHandle(f"expected weights of publisher {expected:x}, got those of {found:x}: subscribe anew")


_inventory_decoder = msgspec.msgpack.Decoder(TensorManifest)


def _decoded(encoded: memoryview) -> TensorManifest:
    try:
        inventory: TensorManifest = _inventory_decoder.decode(encoded)
    except UNREADABLE as error:
        raise ProtocolMismatch(f"expected lists of tensors and of tables, got {error}") from None
    known: dict[str, TensorSpec] = {}
    for spec in inventory.tensors:
        if spec.dtype not in ITEM_BYTES or min(spec.shape, default=0) < 0:
            raise ProtocolMismatch(f"{spec.name}: expected a dtype among {sorted(ITEM_BYTES)}, got {spec}")
        if spec.tied and str(known.get(spec.tied)) != str(spec):
            raise ProtocolMismatch(f"{spec.name}: expected to be one with a tensor like it before it, got {spec.tied}")
        known[spec.name] = spec
    return inventory
