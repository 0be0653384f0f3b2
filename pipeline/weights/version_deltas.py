"""Encodes the deltas of a publisher's versions, each against the version before, once for all hosts that request them.

A version's deltas are encoded in a worker thread from the moment that a host is notified of it, while the publisher's
segment still has the version before. They are kept until the version is overwritten, so that a slow host receives them
although the version before was. Knows no sockets.
"""

from __future__ import annotations

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from ..._schemas.control import DeltaRequest, SpanDelta
from .span_delta import delta_of
from .weight_transfer import digest, span_count, span_extent
from .weights import Publication, WeightReader

KEPT_SHARE = 0.25
"""Bytes of deltas that are kept of one version, as a share of its own: they suffice where 12 % of the words changed.
Further deltas are encoded again for each host, as long as the segment has the version before."""

ENCODERS = 4
"""Spans of a version that are encoded at the same time: four cores keep up with the memory of most machines."""


class DeltaEncoder:
    """The deltas of the two versions in a publisher's segment."""

    def __init__(self, reader: WeightReader) -> None:
        self.tasks: TaskGroup
        """Encodes versions that no host has requested yet; set before the event loop runs on."""
        self._reader = reader
        self._versions: dict[int, _VersionDeltas] = {}

    def begin(self, version: int) -> None:
        """Encode the deltas of `version` from now on, unless that has begun."""
        if version not in self._versions and (deltas := self._of(version)) is not None:
            self.tasks.start_soon(deltas.encode)

    async def delta(self, request: DeltaRequest) -> SpanDelta | None:
        """Return the delta that was requested; None if there is none.

        Raises:
            IndexError: there is no such span.
        """
        deltas = self._of(request.policy_version)
        span_extent(request.index, self._reader.layout.nbytes)
        return None if deltas is None else await deltas.delta(request.index, request.base_version)

    def _of(self, version: int) -> _VersionDeltas | None:
        """Return the deltas of a version in the segment, and forget those of versions that are not."""
        self._versions = {
            each: deltas for each, deltas in self._versions.items() if self._reader.sequence_of(each) is not None
        }
        sequence = self._reader.sequence_of(version)
        if version not in self._versions and sequence is not None:
            newer = Publication(sequence, version)
            self._versions[version] = _VersionDeltas(self._reader, newer, self._reader.before(newer))
        return self._versions.get(version)


class _VersionDeltas:
    """The deltas of one version against the one before."""

    def __init__(self, reader: WeightReader, version: Publication, base: Publication | None) -> None:
        self._reader = reader
        self._version = version
        self._base = base
        """The version before; None if it was overwritten before the encoding began."""
        self._kept: dict[int, SpanDelta | None] = {}
        """Encoded deltas by their span; None for a span that has none."""
        self._room = int(KEPT_SHARE * reader.layout.nbytes)
        """Bytes of further deltas that are kept."""
        self._encoding: dict[int, anyio.Event] = {}
        """Spans that are being encoded, each with the end of that."""
        self._next = iter(range(span_count(reader.layout.nbytes)))
        """Spans to encode before they are requested."""

    async def encode(self) -> None:
        """Encode the deltas of all spans in their order, as far as they are kept and the version before is there."""
        async with anyio.create_task_group() as tasks:
            for _ in range(ENCODERS):
                tasks.start_soon(self._encode)

    async def _encode(self) -> None:
        for index in self._next:
            if self._base is None or self._room <= 0 or not self._reader.intact(self._base.sequence):
                break
            await self.delta(index, self._base.version)

    async def delta(self, index: int, base: int) -> SpanDelta | None:
        """Return the delta of span `index` against version `base`; None if there is none."""
        if self._base is None or self._base.version != base:
            return None
        while index in self._encoding:
            await self._encoding[index].wait()
        if index in self._kept:
            return self._kept[index]
        self._encoding[index] = anyio.Event()
        try:
            return await self._made(index, self._base.sequence)
        finally:
            self._encoding.pop(index).set()

    async def _made(self, index: int, base: int) -> SpanDelta | None:
        """Encode a delta in a worker thread, and keep it if there is room."""
        delta = await anyio.to_thread.run_sync(self._encoded, index, base)
        if delta is None or len(delta.content) <= self._room:
            self._kept[index] = delta
            self._room -= len(delta.content) if delta else 0
        return delta

    def _encoded(self, index: int, base: int) -> SpanDelta | None:
        start, end = span_extent(index, self._reader.layout.nbytes)
        span = self._reader.tensors(self._version.sequence).span(start, end)
        content = delta_of(self._reader.tensors(base).span(start, end), span)
        if content is None:
            return None
        version = self._version.version
        delta = SpanDelta(version, index, digest(span.data, version, index), content)
        return delta if self._reader.intact(base) and self._reader.intact(self._version.sequence) else None
