"""`Curriculum`: leaves rows out that the policy always or never solves, by their rewards in the run so far.

The rewards are in a file of one number a row, which the stage `SuccessRates` writes after the rewards, and the workers
of a source read before they make a prompt. A row that is left out returns after some epochs, so that it is measured
again, and a run always has rows. Knows no stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..._pipeline.errors import InvalidConfig
from ..._pipeline.util.atomic_file import write_atomically
from ..._schemas.numbers import normalize_counts, number_or_nan

DTYPE = np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class Curriculum:
    """Leave rows out whose mean reward, when they were sampled last, is at least `easy` or at most `hard`.

    Raises:
        InvalidConfig: `easy` is not above `hard`, or `revisit` is below 1.
    """

    path: str | Path
    """File of the rewards, on the host of the source's workers; one for each set."""
    easy: float = 1.0
    """Rows with at least so high a mean reward of their group are left out."""
    hard: float = 0.0
    """Rows with at most so high a mean reward of their group are left out."""
    revisit: int = 4
    """A row that is left out is sampled in one of so many epochs; 1 leaves none out."""

    def __post_init__(self) -> None:
        normalize_counts(self, "revisit")
        if not number_or_nan(self.easy) > number_or_nan(self.hard):
            raise InvalidConfig(f"Curriculum.easy: expected a number above hard, {self.hard}, got {self.easy}")

    def reason(self, rate: float, place: int, epoch: int) -> str:
        """Return why row `place` is left out of an epoch, given its mean reward, NaN if unknown; empty if it is not."""
        if (place + epoch) % self.revisit == 0 or not (rate >= self.easy or rate <= self.hard):
            return ""
        return "too easy: its mean reward was high" if rate >= self.easy else "too hard: its mean reward was low"


class RateFile:
    """The mean reward of each row of a set, when it was sampled last; NaN before. Any process of a host may read it."""

    def __init__(self, path: str | Path, rows: int) -> None:
        """Name the file of a set of `rows` rows."""
        self._path = Path(path)
        self._rows = rows
        self._mapped: NDArray[np.float32] | None = None

    def read(self, place: int) -> float:
        """Return the number of a row; NaN while there is no file."""
        if self._mapped is None and self._is_whole():
            self._mapped = np.memmap(self._path, DTYPE, "r", shape=(self._rows,))
        return float("nan") if self._mapped is None else float(self._mapped[place])

    def begin(self, rates: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Write the file with `rates` [rows], or with NaN, in its place; return its memory [rows], to change.

        A file of another size is replaced, and never truncated: a process that reads it would be killed by a signal.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not self._is_whole():
            write_atomically(self._path, np.full(self._rows, np.nan, DTYPE).tobytes())
        memory: NDArray[np.float32] = np.memmap(self._path, DTYPE, "r+", shape=(self._rows,))
        memory[:] = np.nan if rates is None else rates
        return memory

    def _is_whole(self) -> bool:
        return self._path.is_file() and self._path.stat().st_size == self._rows * DTYPE.itemsize
