"""Memory that is used again when the last array on it has died.

Fresh memory is faulted in page by page, which costs several times what copying a batch into it does (measured: half of
a consumer's time). A trainer holds a batch or two at a time, so a few blocks go round.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

__all__ = ["Recycled"]

SPARE_BLOCKS = 3
"""Blocks that are kept for the next batches: one is filled, one waits, one is trained on meanwhile."""


class Recycled:
    """Gives out blocks of memory, and takes them back by themselves."""

    __slots__ = ("_spare",)

    def __init__(self) -> None:
        self._spare: deque[NDArray[np.uint8]] = deque(maxlen=SPARE_BLOCKS)

    def block(self, nbytes: int) -> NDArray[np.uint8]:
        """At least `nbytes` bytes of anything. They are nobody else's until the last view on them dies."""
        try:
            memory = self._spare.pop()
        except IndexError:
            memory = np.empty(nbytes, np.uint8)
        if memory.nbytes < nbytes:
            memory = np.empty(nbytes, np.uint8)
        return np.asarray(_Block(memory, self._spare))


class _Block:
    """The base of every view on a block: numpy asks for `__array_interface__`, and keeps the object."""

    __slots__ = ("__array_interface__", "_memory", "_spare")

    def __init__(self, memory: NDArray[np.uint8], spare: deque[NDArray[np.uint8]]) -> None:
        self._memory = memory
        self._spare = spare
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._spare.append(self._memory)  # in whatever thread the last view died
