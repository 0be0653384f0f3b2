"""Each trajectory is new once: another one is a copy while it is in flight, and after it was trained."""

from __future__ import annotations

import pytest

from penstock import GroupId
from penstock._pipeline.accounting.known_trajectories import KnownTrajectories
from penstock.errors import LedgerImbalance

A = GroupId("math", "a")


def test_a_trajectory_that_was_begun_is_handed_over_once_and_then_is_a_copy() -> None:
    trajectories = KnownTrajectories()

    assert trajectories.begin(A, 0b011) == 0b011
    assert trajectories.begin(A, 0b110) == 0b100
    assert trajectories.hand_over(A, 0b1001) == (0b1000, 0)
    assert trajectories.hand_over(A, 0b1011) == (0, 0b1001)
    assert trajectories.in_flight == 4


def test_a_trajectory_that_has_ended_is_new_again_and_a_trained_one_is_a_copy() -> None:
    trajectories = KnownTrajectories()
    trajectories.hand_over(A, 0b11)

    assert trajectories.remove([(A, 0b11)]) == 2
    trajectories.committed.add(A, 0b10)

    assert trajectories.known(A) == 0b10
    assert trajectories.hand_over(A, 0b11) == (0b01, 0b10)
    with pytest.raises(LedgerImbalance, match=r"math/a repetitions \[1\] was trained before and is admitted again"):
        trajectories.begin(A, 0b10)


def test_only_those_that_are_not_in_flight_are_added_to_end() -> None:
    trajectories = KnownTrajectories()
    trajectories.hand_over(A, 0b01)

    assert trajectories.add_absent([(A, 0b11)]) == 1
    trajectories.check_open([(A, 0b11)], "failed")
    with pytest.raises(LedgerImbalance, match=r"repetitions \[2\] ended as failed but is not in flight"):
        trajectories.check_open([(A, 0b101)], "failed")
