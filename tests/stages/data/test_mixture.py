from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import pytest

from penstock.data import Mixture, PromptDataset
from penstock.errors import InvalidConfig


def rows(name: str, count: int = 5, **options: Any) -> PromptDataset:
    return PromptDataset([{"prompt": f"{name}{n}"} for n in range(count)], name=name, **options)


def sources(mixture: Mixture, count: int) -> list[str]:
    prompts = mixture()
    return [prompts.prompt(number).meta["data_source"] for number in range(count)]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [([3, 1], [75, 25]), ([0.7, 0.3], [70, 30]), ([1, 1, 2], [25, 25, 50]), ([0.123, 0.877], [123, 877])],
)
def test_each_set_has_its_share(weights: list[float], expected: list[int]) -> None:
    names = "abc"[: len(weights)]

    counted = Counter(sources(Mixture([rows(name) for name in names], weights), sum(expected)))

    assert [counted[name] for name in names] == expected


def test_any_stretch_of_prompts_has_each_set_in_about_its_share() -> None:
    drawn = sources(Mixture([rows("a"), rows("b"), rows("c")], [5, 3, 2]), 200)

    stretches = [Counter(drawn[start : start + 20]) for start in range(180)]

    assert all(
        abs(counted[name] - share) <= 1 for counted in stretches for name, share in (("a", 10), ("b", 6), ("c", 4))
    )


def test_each_set_keeps_its_own_epochs() -> None:
    prompts = Mixture([rows("a", 3), rows("b", 50)], [1, 1])()

    drawn = [str(prompts.prompt(number).content) for number in range(12)]

    assert [set(drawn[start : start + 6]) & {"a0", "a1", "a2"} for start in (0, 6)] == [{"a0", "a1", "a2"}] * 2
    assert len({text for text in drawn if text.startswith("b")}) == 6


def test_a_prompt_is_the_same_wherever_it_is_begun() -> None:
    mixture = Mixture([rows("a"), rows("b")], [0.123, 0.877])
    copy = pickle.loads(pickle.dumps(mixture))  # noqa: S301 (just made)

    assert copy().prompt(4321) == [mixture().prompt(number) for number in range(4320, 4322)][1]


@pytest.mark.parametrize(
    ("sets", "weights", "message"),
    [
        ([], [], "weights: expected one for each of at least one set, got 0 for 0"),
        ([rows("a")], [1, 2], "weights: expected one for each of at least one set, got 2 for 1"),
        ([rows("a"), rows("a")], [1, 2], "sets: expected names of their own, got 'a' twice"),
        ([rows("a"), rows("b")], [1, 0], r"weights\['b'\]: expected a finite number above 0"),
        ([rows("a"), rows("b")], [1, 9999], "weights: expected at least a thousandth of all, got less for 'a'"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(sets: list[PromptDataset], weights: list[float], message: str) -> None:
    with pytest.raises(InvalidConfig, match=rf"Mixture\.{message}"):
        Mixture(sets, weights)
