"""Cells of a long table of cases: some run in `make test`, all of them in `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["cells"]


def cells(values: Iterable[Any], *, run: Iterable[Any]) -> list[Any]:
    """Return `values` as parameters of a test, of which `make test` runs those in `run`."""
    values, run = list(values), list(run)
    assert run, "expected a cell that make test runs"
    assert all(value in values for value in run), f"expected cells to run among {values}, got {run}"
    return [value if value in run else _long(value) for value in values]


def _long(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.long)
