"""Memory that is used again when the last array on it has died.

Fresh memory is faulted in page by page, which costs several times what copying a batch into it does (measured: half of
a consumer's time). A trainer holds a batch or two at a time, so a few blocks go round.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Recycled"]

SPARE_BLOCKS = 3
"""Blocks that are kept for the next batches: one is filled, one waits, one is trained on meanwhile."""


class Recycled:
    """Gives out blocks of memory, and takes them back by themselves."""

    __slots__ = ("_spare",)

    def __init__(self) -> None:
        self._spare: deque[_Memory] = deque(maxlen=SPARE_BLOCKS)

    def block(self, nbytes: int) -> NDArray[np.uint8]:
        """At least `nbytes` bytes of anything. They are nobody else's until the last view on them dies."""
        try:
            memory = self._spare.pop()
        except IndexError:
            memory = _Memory(nbytes)
        if memory.nbytes < nbytes:
            memory = _Memory(nbytes)
        return np.asarray(_Block(memory, self._spare))


class _Memory:
    """Memory, and how it is described to numpy: asking it anew would cost 1 µs a batch."""

    __slots__ = ("array", "interface", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.array: NDArray[np.uint8] = np.empty(nbytes, np.uint8)
        self.interface: dict[str, Any] = self.array.__array_interface__


class _Block:
    """The base of every view on a block: numpy asks for `__array_interface__`, and keeps the object."""

    __slots__ = ("__array_interface__", "_memory", "_spare")

    def __init__(self, memory: _Memory, spare: deque[_Memory]) -> None:
        self._memory = memory
        self._spare = spare
        self.__array_interface__ = memory.interface

    def __del__(self) -> None:
        self._spare.append(self._memory)  # in whatever thread the last view died
