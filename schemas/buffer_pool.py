"""Memory that is reused when the last array on it has died.

Fresh memory is faulted in page by page, which costs several times as much as copying a batch into it (measured: half of
a consumer's time). A trainer holds a batch or two at a time, so a few buffers suffice.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .layout import aligned, typed

SPARE_BUFFERS = 3
"""Buffers that are kept for the next batches: one is filled, one waits, one is trained on."""


class BufferPool:
    """A pool of memory; a buffer returns to it when the last array on it dies."""

    __slots__ = ("_spare",)

    def __init__(self) -> None:
        self._spare: deque[_Memory] = deque(maxlen=SPARE_BUFFERS)

    def block(self, nbytes: int) -> Buffer:
        """Return at least `nbytes` uninitialised bytes. They are not reused before the last array on them dies."""
        try:
            memory = self._spare.pop()
        except IndexError:
            memory = _Memory(nbytes)
        if memory.nbytes < nbytes:
            memory = _Memory(nbytes)
        return Buffer(np.asarray(_BufferLease(memory, self._spare)), memory.typed)


class Buffer(NamedTuple):
    """Memory leased from a pool."""

    array: NDArray[np.uint8]
    """For arrays, read-only ones: every view on it extends the lease."""
    typed: list[Any]
    """For writing while `array` is held: the same bytes, item by item, for each of DTYPES."""


class _Memory:
    """Memory, and the views on it that would cost some microseconds a batch if they were made again."""

    __slots__ = ("array", "interface", "nbytes", "typed")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = aligned(max(1, nbytes))
        self.array: NDArray[np.uint8] = np.empty(self.nbytes, np.uint8)
        self.interface: dict[str, Any] = self.array.__array_interface__ | {"data": (self.array.ctypes.data, True)}
        """The interface of read-only arrays: only `typed` writes."""
        self.typed = typed(self.array.data)


class _BufferLease:
    """The base of every view on a buffer: numpy reads `__array_interface__`, and keeps the object."""

    __slots__ = ("__array_interface__", "_memory", "_spare")

    def __init__(self, memory: _Memory, spare: deque[_Memory]) -> None:
        self._memory = memory
        self._spare = spare
        self.__array_interface__ = memory.interface

    def __del__(self) -> None:
        self._spare.append(self._memory)  # in the thread in which the last view died
