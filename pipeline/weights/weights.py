"""Weights in shared memory: two buffers, and a reader never sees a mixture of them.

The publisher writes one buffer while the other is read. A reader that copies checks afterwards whether the publisher
began to overwrite the copied version, and copies again if so; a sampler whose model is views of the buffer checks
before each token. There is no lock, so a killed process leaves no lock behind.

The segment: one page of signed 64-bit words, the header of the layout (`tensor_layout`), two buffers with the tensors'
bytes; each of these begins on a page. The buffers may lie on a device instead, behind a page of their own.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
from collections.abc import Mapping
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ..._schemas import ProtocolMismatch
from ..._schemas.control import DeviceHandle
from ..channels.shared_memory import allocate, may_shrink
from ..errors import OutOfSharedMemory, StaleHandle
from ..util.extras import extra
from .tensor_layout import LENGTH, TensorLayout, WritePlan, header_bytes
from .weight_memory import HostMemory, TensorBuffer, VersionMemory
from .weight_specs import Tensor

NO_VERSION = -1
"""The version of weights that were never published."""

READ_ATTEMPTS = 32
"""Attempts to read the newest version: the second one is needed only if the reader was stalled for a whole version."""

SEQUENCE, LATEST, BEGUN, VERSION, GENERATION = 0, 1, 2, 4, 6
"""Words of the first page: publications so far; the newest version; for each of the two buffers, the publication that
was last begun in it, and its version; the publisher's generation, the only word on a device's page."""


class Publication(NamedTuple):
    """A version that was published."""

    sequence: int
    """Its number, counted from 1; it is in buffer `sequence % 2`."""
    version: int


def _starts(layout: TensorLayout, first: int) -> tuple[int, int, int]:
    """Return the first bytes of the two buffers in a memory, and the end of the second one."""
    nbytes = _pages(max(layout.nbytes, 1))
    return first, first + nbytes, first + 2 * nbytes


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _fence() -> None:
    """Keep the processor from reordering stores and loads across this call: releasing and acquiring a lock does.

    Each call makes its own lock, because the thread that samples and the event loop read at the same time.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


class WeightWriter:
    """The publisher's side. Blocks while it allocates and while it writes: use it in a worker thread."""

    def __init__(self, plan: WritePlan, device: str = "cpu") -> None:
        """Allocate both buffers.

        Raises:
            OutOfSharedMemory: the machine has no room for them.
            NoDevice: there is no such device.
        """
        self._plan = plan
        self.generation = secrets.randbits(63)
        header = plan.layout.header
        first = mmap.PAGESIZE + _pages(len(header))
        *self._buffers, end = _starts(plan.layout, first if device == "cpu" else mmap.PAGESIZE)
        self.nbytes = end if device == "cpu" else first
        """Bytes of the segment."""
        purpose = f"{len(plan.layout.manifest.tensors)} tensors, twice"
        self.fd = allocate(self.nbytes, purpose, "free memory, or publish a smaller model")
        """The segment, for readers; open until `close`."""
        try:
            memory = memoryview(mmap.mmap(self.fd, self.nbytes))
        except OSError as error:
            os.close(self.fd)
            raise OutOfSharedMemory(
                f"expected to map {self.nbytes} bytes of shared memory for {purpose}, got none ({error.strerror}): "
                f"raise the limit of address space (ulimit -v), or publish a smaller model"
            ) from error
        memory[mmap.PAGESIZE : mmap.PAGESIZE + len(header)] = header
        self._words = memory[: mmap.PAGESIZE].cast("q")
        self._words[LATEST], self._words[GENERATION] = NO_VERSION, self.generation
        self.handle: DeviceHandle | None = None
        """The memory of the buffers, if it is not the segment."""
        self._memory: VersionMemory = HostMemory(memory)
        if device != "cpu":
            self._move_to(device, end)

    def _move_to(self, device: str, nbytes: int) -> None:
        try:
            with extra("torch", f"a publisher on {device}"):
                from .device_memory import DeviceMemory  # noqa: PLC0415 (only a process that uses a GPU imports torch)
            memory = DeviceMemory.allocate(device, nbytes)
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

    def write(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Copy checked `tensors` into the buffer that is not the newest, and make it the newest.

        If this is interrupted at any instruction, the version before remains the newest.
        """
        start = self.begin()
        for offset, tensor, spec in self._plan.pieces(tensors):
            self._memory.store(start + offset, tensor, spec)
        self._memory.flush()
        self.complete(version)

    def begin(self) -> int:
        """Declare that the buffer that is not the newest is overwritten from now on; return its first byte."""
        sequence = self.sequence + 1
        self._words[BEGUN + sequence % 2] = sequence
        _fence()
        return self._buffers[sequence % 2]

    def store(self, start: int, elements: NDArray[np.uint8]) -> None:
        """Copy bytes of tensors, from byte `start` of the buffer that `begin` returned, into memory of the host."""
        first = self._buffers[(self.sequence + 1) % 2] + start
        cast("HostMemory", self._memory).bytes[first : first + len(elements)] = elements

    def spans(self, start: int, end: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return bytes `start` to `end` of the newest version, and of the other buffer; not copies.

        The other buffer has the version before until `begin`, then what has been stored of the next one.
        """
        memory = cast("HostMemory", self._memory).bytes
        base, into = (self._buffers[(self.sequence + later) % 2] for later in (0, 1))
        return memory[base + start : base + end], memory[into + start : into + end]

    def complete(self, version: int) -> None:
        """Make the buffer that was filled since `begin` the newest."""
        sequence = self.sequence + 1
        self._words[VERSION + sequence % 2] = version
        _fence()
        self._words[SEQUENCE] = sequence
        _fence()
        self._words[LATEST] = version

    def close(self) -> None:
        """Close the descriptor. Readers keep their mappings; the memory is freed with the last of them."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self._memory.close()


class WeightReader:
    """A subscriber's side: a read-only mapping of the publisher's segment. Blocks while it maps and reads."""

    def __init__(self, fd: int, nbytes: int, generation: int, handle: DeviceHandle | None = None) -> None:
        """Map the segment; `fd` stays the caller's.

        Raises:
            ProtocolMismatch: it is not a segment of weights of that size, or could shrink under the reader.
            StaleHandle: it is a segment of another publisher, or `handle` leads to memory of another.
        """
        size, loose, least = os.fstat(fd).st_size, may_shrink(fd), max(nbytes, mmap.PAGESIZE)
        if size != least or loose:
            can = "can" if loose else "cannot"
            raise ProtocolMismatch(f"expected {least} bytes of weights that cannot shrink, got {size} that {can}")
        memory = memoryview(mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ))
        self.layout = _layout_in(memory[mmap.PAGESIZE :])
        """The layout of each version."""
        self._words = memory[: mmap.PAGESIZE].cast("q")
        _check_generation(self._words[GENERATION], generation)
        self.memory = HostMemory(memory) if handle is None else _opened(handle, generation)
        """The memory of the buffers."""
        first = mmap.PAGESIZE + (_pages(len(self.layout.header)) if handle is None else 0)
        *buffers, end = _starts(self.layout, first)
        if end != (have := nbytes if handle is None else handle.nbytes):
            raise ProtocolMismatch(f"expected two buffers of {(end - first) // 2} bytes from {first}, got {have}")
        self._versions = [TensorBuffer(self.layout, self.memory, start) for start in buffers]

    @property
    def latest(self) -> int:
        """The newest version that was published; −1 before the first. Read from memory, without a system call."""
        return self._words[LATEST]

    def newest(self) -> Publication | None:
        """Return the newest version, read from memory.

        None before the first, and if two publications came between every two words that were read.
        """
        for _ in range(READ_ATTEMPTS):
            if not (sequence := self._words[SEQUENCE]):
                break
            _fence()
            version = self._words[VERSION + sequence % 2]
            _fence()
            if self._words[BEGUN + sequence % 2] == sequence:  # else it may be the next version in this buffer
                return Publication(sequence, version)
        return None

    def sequence_of(self, version: int) -> int | None:
        """Return the publication of `version`; None if it was overwritten, or never published."""
        published = self._words[SEQUENCE]
        _fence()
        for at in (0, 1):
            begun = self._words[BEGUN + at]
            _fence()
            if 0 < begun <= published and self._words[VERSION + at] == version:
                return begun
        return None

    def before(self, publication: Publication) -> Publication | None:
        """Return the publication before `publication`; None if it was overwritten, or never made."""
        sequence = publication.sequence - 1
        version = self._words[VERSION + sequence % 2]
        return Publication(sequence, version) if sequence and self.intact(sequence) else None

    def intact(self, sequence: int) -> bool:
        """Return whether publication `sequence` has not been overwritten: everything read of it so far is valid."""
        _fence()
        return self._words[BEGUN + sequence % 2] == sequence

    def tensors(self, sequence: int) -> TensorBuffer:
        """Return the tensors of publication `sequence`, in the publisher's memory."""
        return self._versions[sequence % 2]

    def read(self) -> tuple[Publication, TensorBuffer] | None:
        """Return the newest version with its tensors, in the publisher's memory; None as for `newest`."""
        newest = self.newest()
        return None if newest is None else (newest, self.tensors(newest.sequence))


def _opened(handle: DeviceHandle, generation: int) -> VersionMemory:
    with extra("torch", "a subscriber to weights on a device"):
        from .device_memory import DeviceMemory  # noqa: PLC0415 (only a process that uses a GPU imports torch)
    memory = DeviceMemory.open(handle)
    _check_generation(memory.marked(), generation)
    return memory


def _check_generation(found: int, expected: int) -> None:
    if found != expected:
        raise StaleHandle(f"expected weights of publisher {expected:x}, got those of {found:x}: subscribe anew")


def _layout_in(memory: memoryview) -> TensorLayout:
    try:
        length = header_bytes(memory[: LENGTH.size], len(memory))
        return TensorLayout.parse(memory[LENGTH.size : LENGTH.size + length])
    except ValueError as error:
        raise ProtocolMismatch(f"expected the header of published tensors, got {error}") from None
