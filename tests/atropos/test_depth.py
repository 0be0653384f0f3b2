"""How much waits: counters that say the same as counting."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.stages.integrations.atropos.queue.depth import Depth

LANES = st.integers(0, 3)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "remove", "take", "pass", "promise", "leave out"]),
        LANES,
        st.sampled_from([1, 2, 3, 8]),
    ),
    min_size=10,
    max_size=40,
)


@settings(max_examples=100)
@given(STEPS)
def test_what_is_told_is_what_there_is(steps: list[tuple[str, int, int]]) -> None:
    depth = Depth()
    here: list[tuple[int, int]] = []
    downstream: list[tuple[int, int]] = []
    least: dict[int, int] = {}
    unpackable = frozenset[int]()
    for step, lane, size in steps:
        if step == "add":
            depth.add(lane, size)
            here.append((lane, size))
        elif step == "remove" and here:
            depth.remove(*here.pop(lane % len(here)))
        elif step == "take" and here:
            downstream.append(here.pop(lane % len(here)))
            depth.taken(*downstream[-1])
        elif step == "pass":
            depth.passed(lane)
            downstream = downstream[-lane:] if lane else []
        elif step == "promise":
            least[lane] = size
            depth.promise(dict(least))
        elif step == "leave out":
            unpackable = frozenset([size] * (lane % 2))
            depth.leave_out(unpackable)
        waiting = here + downstream
        counted = [(lane, size) for lane, size in waiting if size not in unpackable]
        largest = max((size for _, size in counted), default=1)
        sequences = {each: sum(size for lane, size in counted if lane == each) for each in range(4)}
        beyond = {
            each: max(0, math.ceil(sequences[each] / largest) * largest - least.get(each, 0)) for each in range(4)
        }
        assert depth.largest == largest
        for each in range(4):
            assert depth.own(each) == sum(size for lane, size in waiting if lane == each)
            assert depth.others(each) == (sum(beyond.values()) - beyond[each] if largest > 1 else 0)
