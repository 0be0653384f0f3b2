"""The transfer of a version to another host: chunks with hashes, requested by the receiving side.

Decides what to request; knows no sockets. A transfer outlives its connection: only chunks that have not arrived are
requested again.
"""

from __future__ import annotations

from collections import deque

import xxhash

from ..._schemas.control import CHUNK_BYTES, Chunk

WINDOW = 16
"""Chunks that are requested and have not arrived: they fill a link of 1 GB/s whose round trip takes 16 ms."""

MOST_DAMAGED = 8
"""Chunks of a version that may arrive damaged: more than that is not chance."""


def span(index: int, nbytes: int) -> tuple[int, int]:
    """Return the first byte of chunk `index` of `nbytes` bytes, and one behind its last.

    >>> span(1, CHUNK_BYTES + 7)
    (1048576, 1048583)

    Raises:
        IndexError: there is no such chunk.
    """
    start = index * CHUNK_BYTES
    if not 0 <= start < nbytes:
        raise IndexError(f"expected a chunk of {nbytes} bytes, got number {index}")
    return start, min(start + CHUNK_BYTES, nbytes)


def digest(content: bytes) -> bytes:
    """Return the hash of a chunk."""
    return xxhash.xxh3_128_digest(content)


class VersionTransfer:
    """The progress of one version: the chunks that have arrived, and those that were requested.

    >>> transfer = VersionTransfer(version=7, nbytes=2 * CHUNK_BYTES)
    >>> transfer.take()
    [0, 1]
    >>> transfer.on_disconnect(); transfer.take()
    [0, 1]
    """

    def __init__(self, version: int, nbytes: int) -> None:
        """Begin the transfer of a version of `nbytes` bytes."""
        self.version = version
        self.damaged = 0
        """Chunks that arrived damaged."""
        self._nbytes = nbytes
        self._missing = deque(range(-(-nbytes // CHUNK_BYTES)))
        """Chunks that have to be requested."""
        self._requested: set[int] = set()
        """Chunks that were requested on the present connection, and have not arrived."""

    @property
    def done(self) -> bool:
        """Return whether every chunk has arrived."""
        return not self._missing and not self._requested

    def take(self) -> list[int]:
        """Return the chunks to request now."""
        taken = [self._missing.popleft() for _ in range(min(WINDOW - len(self._requested), len(self._missing)))]
        self._requested.update(taken)
        return taken

    def expects(self, chunk: Chunk) -> bool:
        """Return whether `chunk` was requested, and has not arrived yet."""
        return chunk.policy_version == self.version and chunk.index in self._requested

    def intact(self, chunk: Chunk) -> bool:
        """Return whether `chunk` has its length and its hash. Reads all of it: use it in a worker thread."""
        start, end = span(chunk.index, self._nbytes)
        return len(chunk.content) == end - start and digest(chunk.content) == chunk.xxh3

    def on_arrival(self, index: int, *, intact: bool) -> None:
        """Record that a requested chunk has arrived; a damaged one has to be requested again."""
        self._requested.discard(index)
        if not intact:
            self.damaged += 1
            self._missing.append(index)

    def on_disconnect(self) -> None:
        """Record that the connection has ended, and every request with it."""
        self._missing.extendleft(sorted(self._requested, reverse=True))
        self._requested.clear()
