"""A million trajectories through four producers."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import numpy as np
import pytest
from tests.faults.million import LONG, SAME, SHORT, Checker, record_of
from tests.faults.zygote import ROOT, environment

from penstock import TrajectoryGroup


@pytest.mark.parametrize("trajectories", [32_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_trajectories_of_four_producers_arrive_once_in_order_and_bit_for_bit(trajectories: int) -> None:
    command = [sys.executable, "-m", "tests.faults.million", str(trajectories)]
    ran = subprocess.run(command, env=environment(), cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True)

    assert not ran.returncode
    assert ran.stdout.startswith(f"{trajectories:,} trajectories verified")


def _with_a_bit_flipped(record: TrajectoryGroup, name: str) -> TrajectoryGroup:
    column = record.columns()[name].copy()
    column.view(np.uint8)[-1] ^= 1
    return msgspec.structs.replace(record, **{name: column})


@pytest.mark.parametrize("name", [*LONG, *SHORT, *SAME])
def test_a_flipped_bit_is_detected_in_every_column(name: str) -> None:
    checker, record = Checker(), record_of(1, 0)

    with pytest.raises(AssertionError, match=f"{name} of 1.0"):
        checker.check(_with_a_bit_flipped(record, name))


@pytest.mark.parametrize("number", [0, 2], ids=["twice", "one left out"])
def test_a_record_that_comes_twice_or_never_would_be_seen(number: int) -> None:
    checker = Checker()
    checker.check(record_of(1, 0))

    with pytest.raises(AssertionError, match=f"expected 1 of 1, got {number}"):
        checker.check(record_of(1, number))
