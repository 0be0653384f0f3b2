"""Which groups have exactly so many sequences together: what buffers release, and what batches are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

__all__ = ["MOST_SEQUENCES", "can_sum_to", "first_summing_to", "fitting"]

MOST_SEQUENCES = 2**20
"""No batch has more: what sums to a batch is found in so many bits."""


def can_sum_to(counts: Mapping[int, int], wanted: int) -> bool:
    """Whether some groups sum to `wanted`, of which there are so many of a size.

    >>> can_sum_to({3: 2, 4: 1}, 7), can_sum_to({3: 2, 4: 1}, 9)
    (True, False)
    """
    reached, within = 1, (1 << wanted + 1) - 1
    for size, count in counts.items():
        left, together = min(count, wanted // size), 1
        while left:  # 1, 2, 4, … of them at once, and the rest: these have every number of groups as a sum
            step = min(together, left)
            reached |= reached << step * size & within
            left -= step
            together *= 2
    return bool(reached >> wanted)


def fitting(sizes: Iterable[int], wanted: int) -> list[int]:
    """Indices of what fits, from the front, until there are `wanted`; that may be fewer in the end.

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


def first_summing_to(sizes: Sequence[int], wanted: int) -> list[int] | None:
    """Indices of sizes that sum to `wanted`, or None: the first size wherever that can be, then the next, and so on.

    >>> first_summing_to([7, 3, 3, 5], 8)
    [1, 3]
    """
    if sum(sizes) < wanted:
        return None
    reached = [1]
    """Bit n of number i says whether some of the last i sizes sum to n."""
    within = (1 << wanted + 1) - 1
    for size in reversed(sizes):
        reached.append((reached[-1] | reached[-1] << size) & within)
    if not reached.pop() >> wanted:
        return None
    chosen = []
    for index, size in enumerate(sizes):
        if size <= wanted and reached[-1 - index] >> wanted - size & 1:
            chosen.append(index)
            wanted -= size
    return chosen
