"""Which groups have exactly so many sequences together: what buffers release, and what batches are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["fitting", "summing_to"]


def fitting(sizes: Iterable[int], wanted: int) -> list[int]:
    """Indices of what fits, from the front, until there are `wanted`; that may take fewer.

    >>> fitting([5, 4, 2, 1], 8)
    [0, 2, 3]
    """
    chosen = []
    for index, size in enumerate(sizes):
        if size <= wanted:
            chosen.append(index)
            wanted -= size
        if not wanted:
            break
    return chosen


def summing_to(sizes: Sequence[int], wanted: int) -> list[int] | None:
    """Indices of sizes that sum to `wanted`, or None: those that fit from the front, or else the newest that will do.

    >>> summing_to([7, 3, 3, 5], 8)
    [2, 3]
    """
    if wanted < 0 or sum(sizes) < wanted:
        return None
    chosen = fitting(sizes, wanted)
    if sum(sizes[index] for index in chosen) == wanted:
        return chosen
    return _newest_summing_to(sizes, wanted)


def _newest_summing_to(sizes: Sequence[int], wanted: int) -> list[int] | None:
    """Bit n of `reached[i]` says whether some of the first i sizes sum to n."""
    within = (1 << wanted + 1) - 1
    reached = [1]
    while not reached[-1] >> wanted:
        if len(reached) > len(sizes):
            return None
        reached.append((reached[-1] | reached[-1] << sizes[len(reached) - 1]) & within)
    chosen = []
    for index in range(len(reached) - 2, -1, -1):
        size = sizes[index]
        if size <= wanted and reached[index] >> wanted - size & 1:
            chosen.append(index)
            wanted -= size
    return chosen[::-1]
