"""The columns that a record may have, and the only place where their dtype, shape and contents are checked.

It sees arrays and a table of rules, never a whole record. A rule names the axes of a column by letter; the first column
that uses a letter fixes its length, and every later one must have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .errors import InvalidRecord

Array: TypeAlias = NDArray[Any]


class ColumnRule(NamedTuple):
    """The rule of a column."""

    dtype: np.dtype[Any]
    axes: tuple[str, ...]
    """Letters for the shapes that fit, e.g. ("N",) or ("S", "N") for "one a sequence or one a token"; "NK" is 2-D."""
    required: bool = False
    finite: bool = False
    wide: np.dtype[Any] | None = None
    """The dtype of a column with values that `dtype` is too narrow for."""

    @property
    def dtypes(self) -> tuple[np.dtype[Any], ...]:
        """Return the dtypes that fit, the narrowest first."""
        return (self.dtype,) if self.wide is None else (self.dtype, self.wide)

    def dtype_of(self, values: object) -> np.dtype[Any]:
        """Return the dtype for a column of `values`: their own if it fits, else the narrowest one that holds them.

        Values that fit neither are left to `as_column`, which refuses them by name.
        """
        if self.wide is None:
            return self.dtype
        given = values if isinstance(values, np.ndarray) else np.zeros(0)
        for dtype in self.dtypes:
            if given.dtype == dtype:
                return dtype  # not their own: a dtype that only equals it is another type in C
        narrow = given.dtype.kind not in "iu" or not given.size or given.max() <= np.iinfo(self.dtype).max
        return self.dtype if narrow else self.wide


def as_column(name: str, values: object, dtype: DTypeLike) -> Array:
    """Return `values` as a C-contiguous array of exactly `dtype`.

    Lists are converted once, here. An array is used unchanged when its dtype fits, and converted only where its meaning
    survives (int64 token ids that fit int32, float64 rewards): a float where integers belong is rejected.

    Raises:
        InvalidRecord: the values cannot be converted to `dtype` without changing their meaning.
    """
    want = np.dtype(dtype)
    try:
        given = np.asarray(values) if isinstance(values, np.ndarray) else np.array(values)
    except ValueError as error:
        raise InvalidRecord(f"{name}: expected {want} values, got rows of uneven length ({error})") from None
    if given.dtype == want:
        return contiguous(given, given.dtype)
    if given.size == 0:
        return np.zeros(given.shape, want)
    if not _converts(given, want):
        raise InvalidRecord(f"{name}: expected dtype {want}, got {given.dtype}")
    with np.errstate(over="ignore"):  # a float too large for `want` becomes inf; the rule of the column rejects it
        return np.ascontiguousarray(given.astype(want))


def contiguous(column: Array, dtype: np.dtype[Any]) -> Array:
    """Return `column`, of `dtype` under any name, item by item and aligned; copied where it is not.

    A view into bytes from elsewhere may begin at an odd address: to a memoryview its items have another type.
    """
    column = np.ascontiguousarray(column, dtype)
    return column if column.flags.aligned else column.copy()


def _converts(given: Array, want: np.dtype[Any]) -> bool:
    if want.kind == "f":
        return given.dtype.kind in "biuf"
    if want.kind == "b":
        return given.dtype.kind in "iu" and bool(np.isin(given, (0, 1)).all())
    limits = np.iinfo(want)
    return given.dtype.kind in "iu" and bool(given.min() >= limits.min and given.max() <= limits.max)


def check_axes(columns: Mapping[str, Array | None], rules: Mapping[str, ColumnRule], lengths: dict[str, int]) -> None:
    """Check every column against its rule: dtype, shape, finiteness. `lengths` has the known axes, and gets the others.

    Raises:
        InvalidRecord: naming the first column that breaks its rule.
    """
    for name, rule in rules.items():
        column = columns.get(name)
        if column is None:
            if rule.required:
                raise InvalidRecord(f"{name}: expected a column of {rule.dtype}, got none")
            continue
        if not isinstance(column, np.ndarray):
            raise InvalidRecord(f"{name}: expected a numpy array of {rule.dtype}, got {type(column).__name__}")
        if column.dtype not in rule.dtypes:
            raise InvalidRecord(f"{name}: expected dtype {' or '.join(map(str, rule.dtypes))}, got {column.dtype}")
        _check_shape(name, column, rule, lengths)
        if rule.finite and not np.isfinite(column).all():
            where = int(np.flatnonzero(~np.isfinite(column))[0])
            raise InvalidRecord(f"{name}: expected finite values, got {column.flat[where]} at index {where}")


def _check_shape(name: str, column: Array, rule: ColumnRule, lengths: dict[str, int]) -> None:
    for axes in rule.axes:
        if len(axes) == column.ndim and all(
            lengths.get(axis, size) == size for axis, size in zip(axes, column.shape, strict=True)
        ):
            for axis, size in zip(axes, column.shape, strict=True):
                lengths.setdefault(axis, size)
            return
    expected = " or ".join("[" + ", ".join(f"{a}={lengths.get(a, '?')}" for a in axes) + "]" for axes in rule.axes)
    raise InvalidRecord(f"{name}: expected shape {expected}, got {list(column.shape)}")


def count_between(mask: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [S] the number of true entries of `mask` [N] in each run offsets[s]:offsets[s + 1]; offsets is [S + 1]."""
    lengths = offsets[1:] - offsets[:-1]
    counts = np.zeros(len(lengths), np.int64)
    longest = int(lengths.max(initial=0))
    if longest:
        filled = lengths > 0
        narrow = np.uint16 if longest <= np.iinfo(np.uint16).max else np.uint32  # half the width is half the time
        counts[filled] = np.add.reduceat(mask.view(np.uint8), offsets[:-1][filled], dtype=narrow)
    return counts


def count_runs(values: NDArray[np.int64]) -> int:
    """Return the number of runs of equal `values` [S].

    >>> count_runs(np.array([0, 0, 1, 3, 3]))
    3
    """
    return _count_runs(values.tobytes())


@lru_cache(maxsize=16)  # most groups of a run number their rollouts alike
def _count_runs(values: bytes) -> int:
    return sum(1 for _ in groupby(memoryview(values).cast("q")))


def run_starts(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the place of the first of each run of equal `values` [S].

    >>> run_starts(np.array([0, 0, 1, 3, 3])).tolist()
    [0, 2, 3]
    """
    if count_runs(values) == len(values):
        return np.arange(len(values))
    return np.flatnonzero(np.diff(values, prepend=values[:1] + 1))


def run_ends(starts: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the place of the last of each run, of runs at `starts` among `count` values.

    >>> run_ends(np.array([0, 2, 3]), 5).tolist()
    [1, 2, 4]
    """
    return np.append(starts[1:], count) - 1


def freeze(columns: Iterable[Array | None]) -> None:
    """Make arrays read-only, so that a shared record cannot be changed while another task reads it."""
    for column in columns:
        if column is not None:
            column.setflags(write=False)
