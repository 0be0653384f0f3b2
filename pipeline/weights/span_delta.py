"""Deltas of spans: the 16-bit words in which the bytes of two versions differ, lossless for every dtype.

A delta holds the gaps of its entries, then their values, as little-endian 16-bit words, and the last byte of a span
with an odd number of bytes. A gap counts the unchanged words between two entries; a longer one than a word can hold is
divided by entries that write an unchanged word again. Knows neither versions nor hosts.
"""

from __future__ import annotations

from collections.abc import Iterator

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
    >>> delta_of(base, span).hex(" ", 2)
    '0200 0700 00'

    Args:
        base: [nbytes] of the version before.
        span: [nbytes] of the version.
    """
    most = largest_delta(len(span)) // 4
    words, before = _words(span), _words(base)
    changed = _changed(before, words, most)
    if changed is None:
        return None
    positions = _with_fillers(changed)
    if len(positions) > most:
        return None
    gaps = np.diff(positions, prepend=-1) - 1
    return gaps.astype(WORD).tobytes() + words.take(positions).tobytes() + span[2 * len(words) :].tobytes()


def apply_delta(delta: bytes, base: NDArray[np.uint8], into: NDArray[np.uint8]) -> None:
    """Write `base`, changed by `delta`, to `into`; every position is checked before.

    Args:
        delta: what `delta_of` returned, or any bytes.
        base: [nbytes] of the version before.
        into: [nbytes] memory for the version.

    Raises:
        ValueError: it is no delta of a span of so many bytes; nothing was written.
    """
    entries = _entries(delta, len(base))
    gaps = np.frombuffer(delta, WORD, entries)
    positions = np.cumsum(gaps, dtype=np.int64)
    positions += np.arange(entries)
    if entries and positions[-1] >= len(base) // 2:  # they increase
        raise ValueError(f"expected entries within {len(base) // 2} words, got one at {positions[-1]}")
    into[:] = base
    words = _words(into)
    words[positions] = np.frombuffer(delta, WORD, entries, offset=2 * entries)
    into[2 * len(words) :] = np.frombuffer(delta, np.uint8, offset=4 * entries)


def _entries(delta: bytes, nbytes: int) -> int:
    """Return the number of entries of a delta of a span of `nbytes` bytes, which its length gives."""
    odd = nbytes % 2
    if len(delta) > largest_delta(nbytes) or len(delta) < odd or (len(delta) - odd) % 4:
        raise ValueError(
            f"expected at most {largest_delta(nbytes)} bytes of a delta, 4 for each entry and {odd} more, "
            f"got {len(delta)}"
        )
    return len(delta) // 4


def _words(span: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """Return the bytes of a span as words, without the last of an odd number; not a copy."""
    return span[: len(span) // 2 * 2].view(WORD)


def _changed(base: NDArray[np.uint16], words: NDArray[np.uint16], most: int) -> NDArray[np.int64] | None:
    """Return the positions of the words that differ; None if there are more than `most`."""
    found: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    differs = np.empty(min(BLOCK_WORDS, len(words)), np.bool_)
    left = most
    for start in range(0, len(words), BLOCK_WORDS):
        block = words[start : start + BLOCK_WORDS]
        here = np.flatnonzero(np.not_equal(base[start : start + BLOCK_WORDS], block, out=differs[: len(block)]))
        here += start
        found.append(here)
        left -= len(here)
        if left < 0:
            return None
    return np.concatenate(found)


def _with_fillers(changed: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions with those of fillers in the gaps that one word cannot hold."""
    far = np.flatnonzero(np.diff(changed, prepend=-1) > LONGEST_GAP + 1)
    if not len(far):
        return changed
    fillers = [np.arange(start + LONGEST_GAP + 1, end, LONGEST_GAP + 1) for start, end in _gaps(changed, far)]
    return np.sort(np.concatenate([changed, *fillers]))


def _gaps(changed: NDArray[np.int64], far: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield the entries around each long gap; −1 for the beginning."""
    for at in far.tolist():
        yield int(changed[at - 1]) if at else -1, int(changed[at])
