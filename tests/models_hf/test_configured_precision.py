"""Configured runs in every dtype, on a CPU; `make test-gpu` runs the same on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cells import cells
from tests.configured_run import PRECISIONS, check_precision


@pytest.mark.parametrize("name", cells(PRECISIONS, run=["float16"]))
def test_a_run_of_these_dtypes_trains_on_samples_that_its_trainer_finds_likely(name: str, tmp_path: Path) -> None:
    check_precision(tmp_path, name, "cpu")
