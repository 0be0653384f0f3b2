"""Deltas of spans: the 16-bit words in which the bytes of two versions differ, lossless for every dtype.

A delta holds the gaps of its entries, then their values, as little-endian 16-bit words, and the last byte of a span
with an odd number of bytes. A gap counts the unchanged words between two entries; a longer one than a word can hold is
divided by entries that write an unchanged word again. Knows neither versions nor hosts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

WORD = np.dtype("<u2")

LONGEST_GAP = 2**16 - 1
"""Unchanged words that the gap of one entry can hold."""

BLOCK_WORDS = 2**17
"""Words that are compared at once: two blocks and the result fit the second-level cache of one core."""


def largest_delta(nbytes: int) -> int:
    """Return the bytes of the largest delta of a span of `nbytes` bytes: 40 % of its words, each with its gap.

    >>> largest_delta(1001)
    801
    """
    words, odd = divmod(nbytes, 2)
    return 4 * (2 * words // 5) + odd


def delta_of(base: NDArray[np.uint8], span: NDArray[np.uint8]) -> bytes | None:
    """Return the delta from `base` to `span`; None if it would be larger than `largest_delta`.

    >>> base, span = np.zeros(9, np.uint8), np.zeros(9, np.uint8)
    >>> span[4] = 7
    >>> delta_of(base, span).hex(" ")
    '02 00 07 00 00'

    Args:
        base: [nbytes] of the version before.
        span: [nbytes] of the version.
    """
    words, before = _words(span), _words(base)
    gaps, values = list[NDArray[np.uint16]](), list[NDArray[np.uint16]]()
    differs = np.empty(min(BLOCK_WORDS, len(words)), np.bool_)
    left, last = largest_delta(len(span)) // 4, -1
    for start in range(0, len(words), BLOCK_WORDS):
        block = words[start : start + BLOCK_WORDS]
        positions = np.flatnonzero(np.not_equal(before[start : start + BLOCK_WORDS], block, out=differs[: len(block)]))
        if not len(positions):
            continue
        positions += start
        steps = _steps(positions, last)
        if steps.max() > LONGEST_GAP + 1:
            positions = _with_fillers(positions, last)
            steps = _steps(positions, last)
        left -= len(positions)
        if left < 0:
            return None
        gaps.append((steps - 1).astype(WORD))
        values.append(words.take(positions))
        last = int(positions[-1])
    return b"".join([*(part.data for part in gaps), *(part.data for part in values), span[2 * len(words) :].data])


class SpanChanges(NamedTuple):
    """A delta whose every position is within its span."""

    positions: NDArray[np.int64]
    """[entries] words, ascending."""
    values: NDArray[np.uint16]
    """[entries]"""
    tail: NDArray[np.uint8]
    """The last byte of a span with an odd number of bytes; else empty."""

    def apply(self, span: NDArray[np.uint8]) -> None:
        """Change a span: from the version that the delta was made against, to its own."""
        words = _words(span)
        words[self.positions] = self.values
        span[2 * len(words) :] = self.tail


def changes_of(delta: bytes, nbytes: int) -> SpanChanges:
    """Return the changes that `delta` holds, after checking that they are of a span of `nbytes` bytes.

    >>> print(*changes_of(bytes.fromhex("02 00 07 00 00"), 9))
    [2] [7] [0]

    Raises:
        ValueError: it is no delta of such a span.
    """
    odd = nbytes % 2
    if len(delta) > largest_delta(nbytes) or len(delta) < odd or (len(delta) - odd) % 4:
        raise ValueError(
            f"expected at most {largest_delta(nbytes)} bytes of a delta, 4 for each entry and {odd} more, "
            f"got {len(delta)}"
        )
    entries = len(delta) // 4
    positions = np.cumsum(np.frombuffer(delta, WORD, entries), dtype=np.int64)
    positions += np.arange(entries)
    if entries and positions[-1] >= nbytes // 2:  # they ascend
        raise ValueError(f"expected entries within {nbytes // 2} words, got one at {positions[-1]}")
    values = np.frombuffer(delta, WORD, entries, offset=2 * entries)
    return SpanChanges(positions, values, np.frombuffer(delta, np.uint8, offset=4 * entries))


def apply_delta(delta: bytes, base: NDArray[np.uint8], span: NDArray[np.uint8]) -> None:
    """Write into `span` what `base`, of the version before, becomes by `delta`.

    Raises:
        ValueError: it is no delta of such a span; nothing is written.
    """
    changes = changes_of(delta, len(span))
    span[:] = base
    changes.apply(span)


def _words(span: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """Return the bytes of a span as words, without the last of an odd number; not a copy."""
    return span[: len(span) // 2 * 2].view(WORD)


def _steps(positions: NDArray[np.int64], last: int) -> NDArray[np.int64]:
    """Return the distance of each entry from the one before; of the first from entry `last`."""
    steps = np.empty_like(positions)
    np.subtract(positions[1:], positions[:-1], out=steps[1:])
    steps[0] = positions[0] - last
    return steps


def _with_fillers(positions: NDArray[np.int64], last: int) -> NDArray[np.int64]:
    """Return positions with those of fillers in the gaps, also after entry `last`, that a word cannot hold."""
    ends = np.flatnonzero(_steps(positions, last) > LONGEST_GAP + 1)
    starts = np.concatenate([[last], positions])[ends]
    fillers = [
        np.arange(start + LONGEST_GAP + 1, end, LONGEST_GAP + 1)
        for start, end in zip(starts, positions[ends], strict=True)
    ]
    return np.sort(np.concatenate([positions, *fillers]))
