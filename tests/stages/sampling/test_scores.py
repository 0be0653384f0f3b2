from __future__ import annotations

import itertools

import pytest

from penstock._stages.sampling.scores import ks, maj_at_n, mean_at_n, pass_at_k


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_all_choices_of_k_completions_with_a_right_one(n: int) -> None:
    for right in itertools.product([True, False], repeat=n):
        for k in range(1, n + 1):
            choices = list(itertools.combinations(right, k))

            assert pass_at_k(right, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_1_is_the_share_of_right_completions() -> None:
    for right in itertools.product([True, False], repeat=5):
        assert pass_at_k(right, 1) == pytest.approx(mean_at_n(right))


def test_the_majority_is_right_where_the_most_frequent_answer_is() -> None:
    for answers in itertools.product("abc", repeat=4):
        right = [answer == "a" for answer in answers]
        votes = {answer: answers.count(answer) for answer in answers}
        winners = [answer for answer, count in votes.items() if count == max(votes.values())]

        assert maj_at_n(right, answers) == ("a" in winners) / len(winners)


def test_the_majority_does_not_depend_on_the_order_of_the_completions() -> None:
    completions = [(True, "4"), (False, "5"), (True, "4"), (False, "5"), (False, None)]

    found = {maj_at_n(*zip(*order, strict=True)) for order in itertools.permutations(completions)}

    assert found == {0.5}


def test_a_completion_without_an_answer_does_not_vote() -> None:
    assert maj_at_n([False, False, True], [None, None, "4"]) == 1
    assert maj_at_n([True, False], [None, None]) == 0.5


def test_pass_at_k_is_reported_for_powers_of_two_and_for_all_completions() -> None:
    assert [ks(n) for n in (1, 2, 3, 8)] == [[], [2], [2, 3], [2, 4, 8]]
