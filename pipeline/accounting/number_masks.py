"""Store a bit mask for each of many whole numbers, in few bytes where neighbours have the same mask.

Numbers lie in blocks of 1024, and a block has a bit set of numbers for each different mask. A block whose numbers all
have one mask is a single number of the level above, built the same way: n numbers in a row with one mask take memory in
proportion to log n, and gaps between them one bit a number. Knows neither prompts nor repetitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

BLOCK_BITS = 10
"""A block has 2 ** BLOCK_BITS numbers: enough that its dictionary entry costs little memory, and few enough that its
bit sets are changed in less than a microsecond."""

BLOCK = 1 << BLOCK_BITS
FULL = (1 << BLOCK) - 1


class Interval(NamedTuple):
    """Numbers in a row with one mask."""

    first: int
    stop: int
    """One after the last."""
    mask: int


@dataclass(frozen=True, slots=True)
class LoneNumber:
    """The mask of one number: takes less memory than a `NumberMasks`, for series that never get a second number."""

    number: int
    mask: int

    def get(self, number: int) -> int:
        """See `NumberMasks.get`."""
        return self.mask if number == self.number else 0

    def add(self, number: int, mask: int) -> Masks:
        """See `NumberMasks.add`."""
        if number == self.number:
            return LoneNumber(number, self.mask | mask)
        both = NumberMasks()
        both.add(self.number, self.mask)
        return both.add(number, mask)

    def runs(self) -> Iterator[Interval]:
        """See `NumberMasks.runs`."""
        yield Interval(self.number, self.number + 1, self.mask)

    def count(self) -> int:
        """See `NumberMasks.count`."""
        return 1

    def copy(self) -> LoneNumber:
        """See `NumberMasks.copy`."""
        return self


class NumberMasks:
    """A mask above 0 for each of some numbers from 0 on.

    >>> masks = NumberMasks()
    >>> masks.fill(Interval(0, 5000, 0b11))
    >>> masks.add(5000, 0b01).get(5000)
    1
    >>> merged(masks.runs())
    [Interval(first=0, stop=5000, mask=3), Interval(first=5000, stop=5001, mask=1)]
    """

    __slots__ = ("_above", "_blocks")

    def __init__(self) -> None:
        self._blocks: dict[int, dict[int, int]] = {}
        """The numbers of each block that have a mask, as a bit set, by mask; neither empty nor full of one mask."""
        self._above: NumberMasks | None = None
        """The masks of blocks whose numbers all have the same one."""

    def get(self, number: int) -> int:
        """Return the mask of `number`; 0 without one."""
        block = self._blocks.get(number >> BLOCK_BITS)
        if block is None:
            return 0 if self._above is None else self._above.get(number >> BLOCK_BITS)
        place = number % BLOCK
        for mask, numbers in block.items():
            if numbers >> place & 1:
                return mask
        return 0

    def add(self, number: int, mask: int) -> NumberMasks:
        """Add the bits of `mask` to the mask of `number`. Returns itself."""
        earlier = self.get(number)
        if mask & ~earlier:
            if earlier:
                self.remove(number, earlier)
            self._insert(number >> BLOCK_BITS, 1 << number % BLOCK, earlier | mask)
        return self

    def remove(self, number: int, mask: int) -> None:
        """Remove `mask`, the mask of `number`."""
        index = number >> BLOCK_BITS
        if index not in self._blocks:
            self._level_above().remove(index, mask)
            self._blocks[index] = {mask: FULL}
        block = self._blocks[index]
        block[mask] ^= 1 << number % BLOCK
        if not block[mask]:
            del block[mask]
        if not block:
            del self._blocks[index]

    def fill(self, run: Interval) -> None:
        """Set the mask of the numbers of `run`, so far without one."""
        first, stop, mask = run
        while first < stop:
            index, place = divmod(first, BLOCK)
            if place == 0 and stop - first >= BLOCK:
                self._level_above().fill(Interval(index, stop >> BLOCK_BITS, mask))
                first = stop >> BLOCK_BITS << BLOCK_BITS
            else:
                count = min(stop - first, BLOCK - place)
                self._insert(index, ((1 << count) - 1) << place, mask)
                first += count

    def runs(self) -> Iterator[Interval]:
        """Yield the numbers that have a mask, in no order; see `merged`."""
        for index, block in self._blocks.items():
            start = index << BLOCK_BITS
            for mask, numbers in block.items():
                for first, stop in _ones(numbers):
                    yield Interval(start + first, start + stop, mask)
        if self._above is not None:
            for first, stop, mask in self._above.runs():
                yield Interval(first << BLOCK_BITS, stop << BLOCK_BITS, mask)

    def count(self) -> int:
        """Return the number of numbers that have a mask."""
        above = 0 if self._above is None else self._above.count()
        return (above << BLOCK_BITS) + sum(
            numbers.bit_count() for block in self._blocks.values() for numbers in block.values()
        )

    def copy(self) -> NumberMasks:
        """Return an independent copy."""
        copied = NumberMasks()
        copied._blocks = {index: block.copy() for index, block in self._blocks.items()}
        copied._above = None if self._above is None else self._above.copy()
        return copied

    def _level_above(self) -> NumberMasks:
        if self._above is None:
            self._above = NumberMasks()
        return self._above

    def _insert(self, index: int, numbers: int, mask: int) -> None:
        """Set the mask of `numbers` of block `index`, so far without one."""
        block = self._blocks.get(index)
        if block is None:
            block = self._blocks[index] = {}
        block[mask] = numbers = block.get(mask, 0) | numbers
        if numbers == FULL:
            del self._blocks[index]
            self._level_above().add(index, mask)


Masks: TypeAlias = NumberMasks | LoneNumber


def merged(runs: Iterable[Interval]) -> list[Interval]:
    """Return `runs` in order; adjacent ones with the same mask become one."""
    joined: list[Interval] = []
    for run in sorted(runs):
        if joined and (joined[-1].stop, joined[-1].mask) == (run.first, run.mask):
            joined[-1] = Interval(joined[-1].first, run.stop, run.mask)
        else:
            joined.append(run)
    return joined


def _ones(numbers: int) -> Iterator[tuple[int, int]]:
    """Yield each row of ones in `numbers`: its beginning, and one after its end."""
    at = 0
    while numbers:
        zeros = (numbers & -numbers).bit_length() - 1
        numbers >>= zeros
        ones = (numbers ^ (numbers + 1)).bit_length() - 1
        numbers >>= ones
        yield at + zeros, at + zeros + ones
        at += zeros + ones
