from __future__ import annotations

from penstock import GroupId, TrajectoryId


def test_a_trajectory_names_the_prompt_it_answers() -> None:
    assert TrajectoryId("env", "17", 3).group == GroupId("env", "17")


def test_ids_that_would_collide_when_glued_are_different() -> None:
    assert TrajectoryId("a", "b_1", 2) != TrajectoryId("a_b", "1", 2)
    assert len({TrajectoryId("a", "b", 1), TrajectoryId("a", "b", 2), TrajectoryId("a", "b", 1)}) == 2
