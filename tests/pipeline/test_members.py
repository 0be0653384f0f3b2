"""Which members a stream waits for."""

import math

import pytest

from penstock.errors import MemberNameInUse, MemberNameRequired, TooManyMembers
from penstock.pipeline.channels.members import Members, OnAbsence


def members(count: int = 2, on_absence: OnAbsence = "fail") -> Members:
    return Members(count, absence_timeout_s=10, on_absence=on_absence)


def test_as_many_distinct_members_as_were_announced_must_be_done() -> None:
    two = members()

    for name in "aab":
        two.join(name, 1)
        two.done(name)
        assert two.all_done == (name == "b")


def test_a_member_that_comes_again_is_not_done_until_it_says_so_again() -> None:
    one = members(1)
    one.join("a", 1)
    one.done("a")

    one.join("a", 2)
    assert not one.all_done
    one.done("a")
    assert one.all_done


def test_a_member_that_is_lost_is_not_done_however_often_that_happens() -> None:
    two = members()

    for pid in range(5):
        two.join("a", pid)
        two.lose("a", "was killed", 0)

    assert not two.all_done
    assert two.due_s == 10


def test_a_member_that_comes_back_in_time_is_not_given_up() -> None:
    one = members(1)
    one.join("a", 1)
    one.lose("a", "was killed", 0)
    one.join("a", 2)

    assert one.due_s == math.inf
    assert not one.expire(1000)


@pytest.mark.parametrize(("on_absence", "done"), [("fail", False), ("continue", True)])
def test_a_member_that_stays_away_is_named_with_what_to_do(on_absence: OnAbsence, *, done: bool) -> None:
    one = members(1, on_absence)
    one.join("a", 1)
    one.lose("a", "it was killed", 5)

    assert not one.expire(14.9)
    [error] = one.expire(15)
    assert "expected member 'a' to come back within 10 s, got nothing: it was killed. Start it again" in str(error)
    assert one.all_done == done
    assert not one.expire(1000)


def test_a_member_that_was_given_up_and_comes_again_is_sending() -> None:
    one = members(1, "continue")
    one.join("a", 1)
    one.lose("a", "it was killed", 0)
    one.expire(10)

    one.join("a", 2)
    assert not one.all_done


def test_a_sender_without_a_name_is_told_to_have_one() -> None:
    with pytest.raises(MemberNameRequired, match=r"2 members are counted by name, got one without .pid 7.: give"):
        members().join("", 7)


def test_a_second_connection_of_a_name_is_refused_while_the_first_lives() -> None:
    two = members()
    two.join("a", 7)

    with pytest.raises(MemberNameInUse, match=r"a second one .pid 8. beside that of pid 7: give every sender"):
        two.join("a", 8)
    two.lose("a", "was killed", 0)
    two.join("a", 8)


def test_one_name_more_than_announced_is_refused_with_those_that_are_known() -> None:
    three = members(3)
    for name in "abc":
        three.join(name, 1)
    three.done("a")
    three.lose("b", "was killed", 0)

    with pytest.raises(TooManyMembers, match=r"expected 3 members, which are 'a', 'b', 'c', got another one, 'd'"):
        three.join("d", 9)
