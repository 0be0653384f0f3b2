"""Committed prompts are exact as a dictionary is, and take the memory of ranges."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import GroupId
from penstock.accounting import CommittedPrompts

BLOCK = 1024
"""Numbers that are kept as one, where they have the same mask."""

NUMBERS = st.one_of(
    st.integers(0, 40),
    st.integers(BLOCK - 3, BLOCK + 3),
    st.integers(BLOCK**2 - 3, BLOCK**2 + 3),
    st.integers(0, 10**25),
)
NAMES = st.builds(
    "{}{}{}".format, st.sampled_from(["", "r", "1.", "-", "٣", "a\n"]), st.sampled_from(["", "0", "00", "10"]), NUMBERS
)
GROUPS = st.builds(
    GroupId, st.sampled_from(["env", "env1"]), NAMES | st.sampled_from(["", "chess", "0x", "7\n", "²", "17 "])
)
MASKS = st.sampled_from([0b1, 0b10, 0b1111, 0b1111_1111, 1 << 65_535])


def back(committed: CommittedPrompts) -> CommittedPrompts:
    """Return the prompts after a round trip through a checkpoint."""
    return CommittedPrompts.of_state(
        msgspec.json.decode(msgspec.json.encode(committed.state), type=type(committed.state))
    )


@given(st.lists(st.tuples(GROUPS, MASKS), max_size=60), st.lists(GROUPS))
def test_trained_prompts_are_known_exactly_also_after_a_checkpoint(
    trained: list[tuple[GroupId, int]], others: list[GroupId]
) -> None:
    committed, expected = CommittedPrompts(), dict[GroupId, int]()
    for group, mask in trained:
        committed.add(group, mask)
        expected[group] = expected.get(group, 0) | mask

    for each in (committed, CommittedPrompts(committed), CommittedPrompts(expected), back(committed)):
        assert dict(each) == expected
        assert len(each) == len(expected)
        assert [each.mask(group) for group in [*expected, *others]] == [
            expected.get(group, 0) for group in [*expected, *others]
        ]
    assert committed == expected


@settings(max_examples=40)
@given(
    st.integers(0, 2 * BLOCK), st.integers(1, 3 * BLOCK), st.sets(st.integers(0, 5 * BLOCK), max_size=20), st.randoms()
)
def test_ranges_that_fill_in_any_order_and_are_broken_up_again_are_exact(
    first: int, count: int, broken: set[int], shuffled: random.Random
) -> None:
    numbers = list(range(first, first + count))
    shuffled.shuffle(numbers)
    committed = CommittedPrompts()
    for number in numbers:
        committed.add(GroupId("env", str(number)), 0b11)
    for number in broken:
        committed.add(GroupId("env", str(number)), 0b100)

    expected = dict.fromkeys(numbers, 3)
    expected |= {number: expected.get(number, 0) | 0b100 for number in broken}

    for each in (committed, back(committed)):
        assert dict(each) == {GroupId("env", str(number)): mask for number, mask in expected.items()}


def test_a_copy_does_not_change_with_its_original() -> None:
    committed = CommittedPrompts({GroupId("env", str(number)): 0b1 for number in range(2 * BLOCK + 5)})
    before = CommittedPrompts(committed)

    for number in range(3 * BLOCK):
        committed.add(GroupId("env", str(number)), 0b10)

    assert len(before) == 2 * BLOCK + 5
    assert set(before.values()) == {0b1}
    assert set(committed.values()) == {0b11, 0b10}


def order_of_four_workers(count: int) -> list[int]:
    """Return numbers in the order in which four workers finish them, of which each takes every fourth."""
    drawn = random.Random(0)  # noqa: S311 (hides nothing)
    begun = [iter(range(worker, count, 4)) for worker in range(4)]
    held: list[list[int]] = [[next(numbers) for _ in range(16)] for numbers in begun]
    order: list[int] = []
    while any(held):
        mine = drawn.choice([worker for worker in range(4) if held[worker]])
        order.append(held[mine].pop(drawn.randrange(len(held[mine]))))
        held[mine] += [number for number in [next(begun[mine], None)] if number is not None]
    return order


@pytest.mark.parametrize("numbers", [range(20 * BLOCK), order_of_four_workers(20 * BLOCK)], ids=["order", "workers"])
def test_consecutive_prompts_take_the_space_of_one_range_in_any_order(numbers: Sequence[int]) -> None:
    committed = CommittedPrompts()
    for number in numbers:
        committed.add(GroupId("env", f"1.{number}"), 0b1111)

    ranges = [{"env": "env", "name": "1.", "mask": "f", "numbers": [0, 20 * BLOCK]}]
    assert committed.state_dict() == {"ranges": ranges, "prompts": []}
    assert repr(committed) == f"<CommittedPrompts: {20 * BLOCK} prompts>"


def test_a_range_of_any_length_is_read_at_once() -> None:
    state = {"ranges": [{"env": "env", "name": "", "mask": "1", "numbers": [3, 10**18 - 3]}], "prompts": []}

    committed = CommittedPrompts.of_state(state)

    assert committed.state_dict() == state
    assert [committed.mask(GroupId("env", name)) for name in ("2", "3", "9" * 18, "03")] == [0, 1, 1, 0]


def ranges(*numbers: int, name: str = "", mask: str = "1") -> dict[str, Any]:
    return {"env": "env", "name": name, "mask": mask, "numbers": list(numbers)}


@pytest.mark.parametrize(
    ("ranges", "prompts", "message"),
    [
        ([ranges()], [], "gaps and ranges in turn"),
        ([ranges(0, 5, 1)], [], "gaps and ranges in turn"),
        ([ranges(0, 0)], [], "gaps and ranges in turn"),
        ([ranges(0, 5, 0, 5)], [], "gaps and ranges in turn"),
        ([ranges(-1, 5)], [], ">= 0"),
        ([ranges(0, 10**18 + 1)], [], "<= 1000000000000000000"),
        ([ranges(1, 10**18)], [], "that can follow ''"),
        ([ranges(5, 1, name="a1")], [], "that can follow 'a1'"),
        ([ranges(0, 5, mask="0")], [], "regex"),
        ([ranges(0, 5, mask="0x1")], [], "regex"),
        ([ranges(0, 5) | {"more": 1}], [], "unknown field"),
        ([ranges(0, 5), ranges(4, 5, mask="3")], [], "once, got env/4 twice"),
        ([ranges(0, 5)], [("env", "4", "1")], "once, got env/4 twice"),
        ([], [("env", "chess", "1"), ("env", "chess", "2")], "once, got env/chess twice"),
    ],
)
def test_a_state_that_no_run_can_have_written_is_refused(
    ranges: list[Mapping[str, Any]], prompts: list[tuple[str, str, str]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        CommittedPrompts.of_state({"ranges": ranges, "prompts": prompts})
