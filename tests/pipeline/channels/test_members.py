"""A stream waits for its members."""

import math

import pytest

from penstock._pipeline.channels.members import Members, OnAbsence
from penstock.errors import MemberNameInUse, MemberNameRequired, TooManyMembers


def members(count: int = 2, on_absence: OnAbsence = "fail") -> Members:
    opened = Members(count, absence_timeout_s=10, on_absence=on_absence)
    opened.open(0)
    return opened


def test_as_many_distinct_members_as_were_announced_must_be_done() -> None:
    two = members()

    for name in "aab":
        two.join(name, 1, 0)
        two.done(name)
        assert two.all_done == (name == "b")


def test_a_member_that_comes_again_is_not_done_until_it_says_so_again() -> None:
    one = members(1)
    one.join("a", 1, 0)
    one.done("a")

    one.join("a", 2, 0)
    assert not one.all_done
    one.done("a")
    assert one.all_done


def test_a_member_that_is_lost_is_not_done_however_often_that_happens() -> None:
    two = members()

    for pid in range(5):
        two.join("a", pid, 0)
        two.lose("a", "was killed", 3)

    assert not two.all_done


def test_a_member_that_comes_back_in_time_is_not_given_up() -> None:
    one = members(1)
    one.join("a", 1, 0)
    one.lose("a", "was killed", 0)
    one.join("a", 2, 0)

    assert one.due_s == math.inf
    assert not one.expire(1000)


@pytest.mark.parametrize(("on_absence", "done"), [("fail", False), ("continue", True)])
def test_a_member_that_stays_away_is_named_with_what_to_do(on_absence: OnAbsence, *, done: bool) -> None:
    one = members(1, on_absence)
    one.join("a", 1, 0)
    one.lose("a", "it was killed", 5)

    assert not one.expire(14.9)
    [error] = one.expire(15)
    assert "expected member 'a' to come back within 10 s, got nothing: it was killed. Start it again" in str(error)
    assert one.all_done == done
    assert not one.expire(1000)


def test_a_member_that_was_given_up_and_comes_again_is_sending() -> None:
    one = members(1, "continue")
    one.join("a", 1, 0)
    one.lose("a", "it was killed", 0)
    one.expire(10)

    one.join("a", 2, 0)
    assert not one.all_done


def test_a_sender_without_a_name_is_rejected_with_the_remedy() -> None:
    with pytest.raises(MemberNameRequired, match=r"2 members are counted by name, got one without .pid 7.: give"):
        members().join("", 7, 0)


def test_a_second_connection_of_a_name_is_refused_while_the_first_lives() -> None:
    two = members()
    two.join("a", 7, 0)

    with pytest.raises(MemberNameInUse, match=r"a second one .pid 8. beside that of pid 7: give every sender"):
        two.join("a", 8, 0)
    two.lose("a", "was killed", 0)
    two.join("a", 8, 0)


def test_one_name_more_than_announced_is_refused_with_those_that_are_known() -> None:
    three = members(3)
    for name in "abc":
        three.join(name, 1, 0)
    three.done("a")
    three.lose("b", "was killed", 0)

    with pytest.raises(TooManyMembers, match=r"expected 3 members, which are 'a', 'b', 'c', got another one, 'd'"):
        three.join("d", 9, 0)


@pytest.mark.parametrize("connected", [(), ("a",), ("b", "a")])
def test_absent_members_are_an_error_with_their_number_and_the_connected_ones(connected: tuple[str, ...]) -> None:
    three = members(3)
    for name in connected:
        three.join(name, 1, 0)
        three.done(name)

    assert not three.expire(9.9)
    [error] = three.expire(10)

    names = ", ".join(map(repr, sorted(connected))) or "none"
    assert f"got {len(connected)} ({names}): {3 - len(connected)} never came. Start them" in str(error)
    assert not three.all_done
    assert three.due_s == math.inf


def test_a_member_that_comes_for_the_first_time_gives_the_missing_their_time_anew() -> None:
    three = members(3)

    three.join("a", 1, 8)
    assert three.due_s == 18
    three.done("a")
    three.join("a", 1, 9)
    assert three.due_s == 18
    three.join("b", 1, 17)
    assert three.due_s == 27
    three.join("c", 1, 26)
    assert three.due_s == math.inf


def test_the_stream_goes_on_with_those_that_came_where_that_was_chosen_and_with_one_that_comes_late() -> None:
    two = members(2, "continue")
    two.join("a", 1, 0)

    assert len(two.expire(10)) == 1
    two.join("b", 1, 20)
    two.done("a")
    assert not two.all_done
    two.done("b")
    assert two.all_done


def test_the_stream_ends_without_the_missing_when_those_that_came_are_done() -> None:
    two = members(2, "continue")
    two.join("a", 1, 0)
    two.expire(10)

    assert not two.all_done
    two.done("a")
    assert two.all_done
