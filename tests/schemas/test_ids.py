from __future__ import annotations

import pickle

import msgspec

from penstock import GroupId, TrajectoryId


def test_a_trajectory_names_the_prompt_it_answers() -> None:
    assert TrajectoryId("env", "17", 3).group == GroupId("env", "17")


def test_ids_that_would_collide_when_glued_are_different() -> None:
    assert TrajectoryId("a", "b_1", 2) != TrajectoryId("a_b", "1", 2)
    assert len({TrajectoryId("a", "b", 1), TrajectoryId("a", "b", 2), TrajectoryId("a", "b", 1)}) == 2


def test_ids_survive_pickle_and_msgpack() -> None:
    given = TrajectoryId("env", "17", 3)

    assert pickle.loads(pickle.dumps(given)) == given  # noqa: S301 (our own bytes)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(given), type=TrajectoryId) == given
