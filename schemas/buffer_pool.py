"""Memory that is used again when the last array on it has died.

Fresh memory is faulted in page by page, which costs several times what copying a batch into it does (measured: half of
a consumer's time). A trainer holds a batch or two at a time, so a few blocks go round.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .layout import aligned, typed

__all__ = ["Buffer", "BufferPool"]

SPARE_BUFFERS = 3
"""Blocks that are kept for the next batches: one is filled, one waits, one is trained on meanwhile."""


class BufferPool:
    """Gives out blocks of memory, and takes them back by themselves."""

    __slots__ = ("_spare",)

    def __init__(self) -> None:
        self._spare: deque[_Memory] = deque(maxlen=SPARE_BUFFERS)

    def block(self, nbytes: int) -> Buffer:
        """At least `nbytes` bytes of anything. They are nobody else's until the last array on them dies."""
        try:
            memory = self._spare.pop()
        except IndexError:
            memory = _Memory(nbytes)
        if memory.nbytes < nbytes:
            memory = _Memory(nbytes)
        return Buffer(np.asarray(_BufferLease(memory, self._spare)), memory.typed)


class Buffer(NamedTuple):
    """Some memory on loan."""

    array: NDArray[np.uint8]
    """To make arrays of, read-only ones: every view on it extends the loan."""
    typed: list[Any]
    """To write through while `array` is held: the same bytes, item by item, for each of DTYPES."""


class _Memory:
    """Memory, and the views on it that would cost some microseconds a batch if they were made anew."""

    __slots__ = ("array", "interface", "nbytes", "typed")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = aligned(max(1, nbytes))
        self.array: NDArray[np.uint8] = np.empty(self.nbytes, np.uint8)
        self.interface: dict[str, Any] = self.array.__array_interface__ | {"data": (self.array.ctypes.data, True)}
        """Of read-only arrays: only `typed` writes."""
        self.typed = typed(self.array.data)


class _BufferLease:
    """The base of every view on a block: numpy asks for `__array_interface__`, and keeps the object."""

    __slots__ = ("__array_interface__", "_memory", "_spare")

    def __init__(self, memory: _Memory, spare: deque[_Memory]) -> None:
        self._memory = memory
        self._spare = spare
        self.__array_interface__ = memory.interface

    def __del__(self) -> None:
        self._spare.append(self._memory)  # in whatever thread the last view died
