"""The transfer of a version to another host: deltas of spans, or chunks, with hashes, requested by the receiving side.

A host that has a version whole requests the changes of each span since then; where there are none to send, the chunks
of the span, and so does a host that has none. Decides what to request; knows no sockets. A transfer outlives its
connection: only spans and chunks that have not arrived are requested again.
"""

from __future__ import annotations

from collections import deque

import xxhash

from ..._schemas.control import CHUNK_BYTES, SPAN_CHUNKS, Chunk, ChunkRequest, DeltaRequest, NoDelta, SpanDelta
from .span_delta import largest_delta

WINDOW = 16
"""Messages that are requested and have not arrived, and the number of chunks whose bytes they have at most: they fill a
link of 1 GB/s whose round trip takes 16 ms."""

MOST_DAMAGED = 8
"""Chunks and deltas of a version that may arrive damaged: more than that is not chance."""


def extent(index: int, nbytes: int) -> tuple[int, int]:
    """Return the first byte of chunk `index` of `nbytes` bytes, and one behind its last.

    >>> extent(1, CHUNK_BYTES + 7)
    (1048576, 1048583)

    Raises:
        IndexError: there is no such chunk.
    """
    return _extent("chunk", index, nbytes, CHUNK_BYTES)


def span_extent(index: int, nbytes: int) -> tuple[int, int]:
    """Return the first byte of span `index` of `nbytes` bytes, and one behind its last.

    Raises:
        IndexError: there is no such span.
    """
    return _extent("span", index, nbytes, SPAN_CHUNKS * CHUNK_BYTES)


def span_count(nbytes: int) -> int:
    """Return the number of spans of `nbytes` bytes."""
    return -(-nbytes // (SPAN_CHUNKS * CHUNK_BYTES))


def _extent(kind: str, index: int, nbytes: int, each: int) -> tuple[int, int]:
    start = index * each
    if not 0 <= start < nbytes:
        raise IndexError(f"expected a {kind} of {nbytes} bytes, got number {index}")
    return start, min(start + each, nbytes)


def digest(content: bytes | memoryview, version: int, index: int) -> bytes:
    """Return the hash of chunk or span `index` of `version`: one that is taken for another has another hash."""
    return xxhash.xxh3_128_digest(content, (version << 32 ^ index) % 2**64)


class VersionTransfer:
    """The progress of one version: the spans and chunks that have arrived, and those that were requested.

    >>> transfer = VersionTransfer(version=7, nbytes=2 * CHUNK_BYTES)
    >>> transfer.take()
    [ChunkRequest(policy_version=7, index=0), ChunkRequest(policy_version=7, index=1)]
    >>> VersionTransfer(version=7, nbytes=2 * CHUNK_BYTES, base=6).take()
    [DeltaRequest(policy_version=7, base_version=6, index=0)]
    """

    def __init__(self, version: int, nbytes: int, base: int | None = None) -> None:
        """Begin the transfer of a version of `nbytes` bytes, to a host that has version `base`, or none."""
        self.version = version
        self.damaged = 0
        """Chunks and deltas that arrived damaged."""
        self._nbytes = nbytes
        self._base = base
        chunks = range(-(-nbytes // CHUNK_BYTES))
        self._chunks = deque(chunks if base is None else ())
        """Chunks that have to be requested."""
        self._spans = deque(() if base is None else range(span_count(nbytes)))
        """Spans whose deltas have to be requested."""
        self._requested: dict[type[ChunkRequest | DeltaRequest], set[int]] = {ChunkRequest: set(), DeltaRequest: set()}
        """Chunks and deltas that were requested on the present connection, and have not arrived."""
        self._largest_delta = 0
        """Bytes of the largest delta that has arrived; 0 before the first."""

    @property
    def done(self) -> bool:
        """Return whether all has arrived."""
        return not (self._spans or self._chunks or any(self._requested.values()))

    def take(self) -> list[ChunkRequest | DeltaRequest]:
        """Return the requests to send now: of deltas first, because their base may be overwritten soon."""
        taken: list[ChunkRequest | DeltaRequest] = []
        while (request := self._next()) is not None:
            self._requested[type(request)].add(request.index)
            taken.append(request)
        return taken

    def _next(self) -> ChunkRequest | DeltaRequest | None:
        if self._spans and self._base is not None and self._has_room(self._delta_bytes()):
            return DeltaRequest(self.version, self._base, self._spans.popleft())
        if self._chunks and self._has_room(CHUNK_BYTES):
            return ChunkRequest(self.version, self._chunks.popleft())
        return None

    def _has_room(self, nbytes: int) -> bool:
        """Return whether so many bytes may be requested besides those that have not arrived."""
        chunks, deltas = (len(self._requested[kind]) for kind in (ChunkRequest, DeltaRequest))
        expected = chunks * CHUNK_BYTES + deltas * self._delta_bytes() + nbytes
        return chunks + deltas < WINDOW and expected <= WINDOW * CHUNK_BYTES

    def _delta_bytes(self) -> int:
        """Return the bytes that a delta is expected to have: those of the largest so far, or of the largest of all."""
        return self._largest_delta or largest_delta(SPAN_CHUNKS * CHUNK_BYTES)

    def expects(self, answer: Chunk | SpanDelta | NoDelta) -> bool:
        """Return whether `answer` was requested, and has not arrived yet."""
        kind = ChunkRequest if isinstance(answer, Chunk) else DeltaRequest
        return answer.policy_version == self.version and answer.index in self._requested[kind]

    def intact(self, chunk: Chunk) -> bool:
        """Return whether `chunk` has its length and its hash. Reads all of it: use it in a worker thread."""
        start, end = extent(chunk.index, self._nbytes)
        return len(chunk.content) == end - start and digest(chunk.content, self.version, chunk.index) == chunk.xxh3

    def on_chunk(self, index: int, *, intact: bool) -> None:
        """Record that a requested chunk has arrived; a damaged one has to be requested again."""
        self._requested[ChunkRequest].discard(index)
        if not intact:
            self.damaged += 1
            self._chunks.append(index)

    def on_delta(self, delta: SpanDelta, *, intact: bool) -> None:
        """Record that a requested delta has arrived; the chunks of a damaged one have to be requested."""
        self._requested[DeltaRequest].discard(delta.index)
        self._largest_delta = max(self._largest_delta, len(delta.content), 1)
        if not intact:
            self.damaged += 1
            self._request_chunks(delta.index)

    def on_no_delta(self, index: int) -> None:
        """Record that there is no delta of a span: its chunks have to be requested."""
        self._requested[DeltaRequest].discard(index)
        self._request_chunks(index)

    def _request_chunks(self, span: int) -> None:
        start, end = span_extent(span, self._nbytes)
        self._chunks.extend(range(start // CHUNK_BYTES, -(-end // CHUNK_BYTES)))

    def on_disconnect(self) -> None:
        """Record that the connection has ended, and every request with it."""
        for missing, kind in ((self._spans, DeltaRequest), (self._chunks, ChunkRequest)):
            missing.extendleft(sorted(self._requested[kind], reverse=True))
            self._requested[kind].clear()
