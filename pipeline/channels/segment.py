"""A segment: anonymous shared memory that one process writes and another reads.

It has no name: the kernel frees it with its last holder, also after SIGKILL. It is sealed against shrinking and
allocated in full before use, so that a full machine is an error at the start and never a SIGBUS.

First a table of `HEADER_BYTES` a slot, then the slots. The header of a span's first slot is the truth about it (state,
generation, sequence, bytes; the state is written last), the descriptor on the socket only announces it. A span holds
the columns of a bundle, followed by its contents, which end with the span's bytes.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..._schemas import Array
from ..._schemas.descriptor import Descriptor
from ..._schemas.layout import ALIGNMENT, DTYPES, Layout, Place, aligned, copy_into, typed
from ..errors import OutOfSharedMemory, StaleDescriptor
from .checksum import checked, with_checksum
from .shared_memory import allocate, may_shrink
from .slots import Span

DEFAULT_SLOT_BYTES = 1024
"""Small enough that a record wastes little of its last slot, large enough that the header table stays under 4 %."""

HEADER_BYTES = 32
_HEADER = struct.Struct("<BxHIQQQ")
"""state, records, bytes of the contents, generation, sequence, bytes of the bundle."""

FREE, WRITING, PUBLISHED = 0, 1, 2

_MAP_POPULATE = mmap.MAP_POPULATE
"""Faults in every page at once (19 ms for 256 MB) instead of one by one on the record path (560 ms)."""


def segment_bytes(slots: int, slot_bytes: int) -> int:
    """Return the bytes of a segment of `slots` slots."""
    return _table_bytes(slots) + slots * slot_bytes


def _table_bytes(slots: int) -> int:
    return -(-slots * HEADER_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE


class SegmentWriter:
    """The producer's side. Blocks while it allocates: create it in a worker thread."""

    def __init__(self, slots: int, slot_bytes: int = DEFAULT_SLOT_BYTES) -> None:
        if slot_bytes % ALIGNMENT:
            raise ValueError(f"expected slot_bytes to be a multiple of {ALIGNMENT}, got {slot_bytes}")
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.nbytes = segment_bytes(slots, slot_bytes)
        purpose = f"{slots} slots of {slot_bytes} bytes"
        self.fd = allocate(self.nbytes, purpose, "lower capacity_bytes or the number of senders, or free memory")
        """The segment's file descriptor, to be sent to the reader; open until `close`."""
        try:
            self._map = _mapped(self.fd, self.nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(self.fd)
            raise
        self._bytes = memoryview(self._map)
        self._typed = typed(self._bytes)
        self._payload = _table_bytes(slots)

    def write(
        self, span: Span, contents: bytes, records: Iterable[Iterable[Array]], layout: Layout, *, checksum: bool = False
    ) -> None:
        """Copy the columns of `records`, plain ones, into `span`; its header has the state "writing" until `publish`.

        With `checksum`, the contents are followed by one over columns and contents.

        Raises:
            TypeError, ValueError: the columns do not fit `layout`.
        """
        target, views = self._bytes, self._typed
        _HEADER.pack_into(target, span.start * HEADER_BYTES, WRITING, 0, len(contents), span.generation, 0, 0)
        at = self._payload + span.start * self.slot_bytes
        bases = [at // itemsize for itemsize in _ITEM_BYTES]
        for columns, (index, first, last) in zip(zip(*records, strict=True), layout.places, strict=True):
            if last - first <= JOINED_ITEMS:
                itemsize = _ITEM_BYTES[index]
                target[at + first * itemsize : at + last * itemsize] = _joined(columns)
                continue
            view, begin = views[index], bases[index] + first
            for column in columns:
                end = begin + len(column)
                copy_into(view, begin, end, column)
                begin = end
            if begin != bases[index] + last:
                raise ValueError(f"{last - first} items were placed, {begin - bases[index] - first} are left")
        if checksum:
            contents = with_checksum(contents, [target[at : at + layout.nbytes]])
        at += layout.nbytes
        target[at : at + len(contents)] = contents

    def publish(self, span: Span, contents_bytes: int, nbytes: int) -> None:
        """Give the span to the reader: it is found even if this process is killed before it sends the descriptor."""
        at, target = span.start * HEADER_BYTES, self._bytes
        _HEADER.pack_into(target, at, WRITING, span.records, contents_bytes, span.generation, span.sequence, nbytes)
        target[at] = PUBLISHED

    def free(self, span: Span) -> None:
        """Mark a span that the reader has released as free."""
        self._bytes[span.start * HEADER_BYTES] = FREE

    def close(self) -> None:
        """Unmap and close. The reader keeps its own mapping."""
        if self.fd >= 0:
            for view in (*self._typed, self._bytes):
                view.release()
            self._map.close()
            os.close(self.fd)
            self.fd = -1


def _mapped(fd: int, nbytes: int, protection: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, nbytes, mmap.MAP_SHARED | _MAP_POPULATE, protection)
    except (OSError, OverflowError) as error:
        raise OutOfSharedMemory(
            f"expected room for {nbytes} bytes in this process' address space, got none ({error}): raise its limit "
            f"(ulimit -v), or lower capacity_bytes"
        ) from error


def _joined(columns: Sequence[Any]) -> bytes:
    try:
        return b"".join(columns)
    except TypeError:  # one has gaps between its items
        return b"".join([column.tobytes() for column in columns])


JOINED_ITEMS = 1024
"""Columns of so few items in total are joined before they are copied: a copy of each costs more than its bytes."""

_ITEM_BYTES = [dtype.itemsize for dtype in DTYPES]


class Lease:
    """The right to read one record of a span; ends with the last array view on it.

    numpy asks for `__array_interface__` and keeps the lease as the base of every view it makes.
    """

    __slots__ = ("__array_interface__", "_released", "descriptor", "segment")

    def __init__(
        self, segment: SegmentReader, descriptor: Descriptor, address: int, released: Callable[[Descriptor, int], None]
    ) -> None:
        self.segment = segment
        """Keeps the mapping alive, even after the sender has disconnected."""
        self.descriptor = descriptor
        self._released = released
        self.__array_interface__: dict[str, Any] = {
            "data": (address, True),
            "shape": (descriptor.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        self._released(self.descriptor, 1)


class SegmentReader:
    """The consumer's side: a read-only mapping of a segment that was received. Blocks while it maps."""

    def __init__(self, fd: int, slots: int, slot_bytes: int) -> None:
        """Map the segment; `fd` stays the caller's.

        Raises:
            OutOfSharedMemory: this process has no room to map it.
            StaleDescriptor: the file is smaller than declared, could be shrunk while it is read, or has no slots.
        """
        self.slots = slots
        self.slot_bytes = slot_bytes
        if slots < 1 or slot_bytes < ALIGNMENT:
            raise StaleDescriptor(f"expected at least one slot of {ALIGNMENT} bytes, got {slots} of {slot_bytes}")
        nbytes = segment_bytes(slots, slot_bytes)
        size, shrinkable = os.fstat(fd).st_size, may_shrink(fd)
        if size < nbytes or shrinkable:
            can = "can" if shrinkable else "cannot"
            raise StaleDescriptor(f"expected a segment of {nbytes} bytes that cannot shrink, got {size} that {can}")
        self._map = _mapped(fd, nbytes, mmap.PROT_READ)
        self._payload = _table_bytes(slots)
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self._address = int(self._bytes.ctypes.data) + self._payload
        self._typed = typed(memoryview(self._map).cast("B"))

    def lease(self, descriptor: Descriptor, released: Callable[[Descriptor, int], None]) -> Array:
        """Return the bytes of a bundle that has `contents`, as a read-only array with a lease on one of its records."""
        return np.asarray(Lease(self, descriptor, self._address + descriptor.slot * self.slot_bytes, released))

    def columns(self, descriptor: Descriptor, places: Iterable[Place]) -> list[memoryview]:
        """Return the columns at `places` of a bundle that has `contents`, to be checked before anything is awaited."""
        at, views = self._payload + descriptor.slot * self.slot_bytes, self._typed
        bases = [at // itemsize for itemsize in _ITEM_BYTES]
        return [views[index][bases[index] + first : bases[index] + last] for index, first, last in places]

    def contents(self, descriptor: Descriptor) -> bytes:
        """Return a copy of the contents of a bundle.

        Raises:
            StaleDescriptor: the span is out of bounds, was reused, or is not published.
        """
        sequence, records, slot, slots, generation, nbytes = descriptor
        if not (0 <= slot < slot + slots <= self.slots and 0 < nbytes <= slots * self.slot_bytes):
            raise StaleDescriptor(
                f"expected a span within {self.slots} slots of {self.slot_bytes} bytes, got {descriptor}"
            )
        state, held, contents_bytes, *found = _HEADER.unpack_from(self._map, slot * HEADER_BYTES)
        if state != PUBLISHED or held != records or found != [generation, sequence, nbytes]:
            raise StaleDescriptor(
                f"expected slot {slot} to hold {descriptor}, got state {state}, {held} records, generation {found[0]}, "
                f"sequence {found[1]}, {found[2]} bytes"
            )
        if aligned(contents_bytes) > nbytes:
            raise StaleDescriptor(f"expected contents within {nbytes} bytes, got {contents_bytes}")
        at = self._payload + slot * self.slot_bytes + nbytes - aligned(contents_bytes)
        return self._map[at : at + contents_bytes]

    def check(self, descriptor: Descriptor, contents: bytes) -> bytes:
        """Return `contents` of a bundle without the checksum that follows them.

        Raises:
            ChecksumDiffers: the bytes are not those that were written.
        """
        at = self._payload + descriptor.slot * self.slot_bytes
        return checked(contents, [self._bytes[at : at + descriptor.nbytes - aligned(len(contents))]])

    def published_after(self, sequence: int) -> list[Descriptor]:
        """Return the published bundles beyond record `sequence`, from the header table, for a sender that was killed.

        Its last descriptors may never have left the process; the headers did.
        """
        table = self._bytes[: self.slots * HEADER_BYTES].view(_HEADER_DTYPE)
        ready = np.flatnonzero((table["state"] == PUBLISHED) & (table["sequence"] > sequence))
        found = [
            Descriptor(sequence, records, slot, -(-nbytes // self.slot_bytes), generation, nbytes)
            for slot, (_, records, _, generation, sequence, nbytes) in zip(
                ready.tolist(), table[ready].tolist(), strict=True
            )
        ]
        return sorted(found)


_HEADER_DTYPE = np.dtype(
    [
        ("state", "<u2"),
        ("records", "<u2"),
        ("contents_bytes", "<u4"),
        ("generation", "<u8"),
        ("sequence", "<u8"),
        ("nbytes", "<u8"),
    ]
)
