"""Brings the buffer for a mirror's next version up to the newest one, by the deltas that made that one if possible.

The buffer holds the version before the newest. So most of a span need not be copied: the deltas of the newest version
are applied once more. They are kept while that is less work than a copy. Knows no sockets.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .span_delta import changes_of

MOST_SHARE = 0.125
"""Bytes of a delta that is kept, as a share of its span: applying one of 6 % of the words takes as long as a copy."""


class SpanHistory:
    """The deltas of a mirror's newest version, and of the one that it receives, by their span."""

    def __init__(self) -> None:
        self._newest: dict[int, bytes] = {}
        """Those of the newest version, for spans of the buffer that still hold the version before."""
        self._next: dict[int, bytes] = {}

    def bring_up(self, index: int, newest: NDArray[np.uint8], span: NDArray[np.uint8]) -> None:
        """Make `span` equal to `newest`, the same span of the newest version."""
        delta = self._newest.pop(index, None)  # afterwards it holds another version
        if delta is None:
            span[:] = newest
        else:
            changes_of(delta, len(span)).apply(span)

    def on_overwritten(self, index: int) -> None:
        """Record that bytes of a span were written without `bring_up`."""
        self._newest.pop(index, None)

    def on_delta(self, index: int, delta: bytes, nbytes: int) -> None:
        """Record that `delta` has made a span of `nbytes` bytes of the next version."""
        if len(delta) <= MOST_SHARE * nbytes:
            self._next[index] = delta

    def on_complete(self) -> None:
        """Record that the next version is the newest."""
        self._newest, self._next = self._next, {}

    def on_abandoned(self) -> None:
        """Record that the next version will never be complete."""
        self._next = {}
