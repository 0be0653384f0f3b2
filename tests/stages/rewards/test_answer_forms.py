"""Answers of every form: each equals itself in any notation, and nothing else in it does. One process for them all."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from anyio.from_thread import start_blocking_portal
from tests.stages.answers import answering

from penstock.errors import InvalidData
from penstock.rewards import MathVerify, RewardInput

Judge = Callable[[RewardInput], Awaitable[float | None]]

Verdicts = Callable[..., list[float | None]]


class Answer(NamedTuple):
    kind: str
    text: str
    notation: str = ""
    """The same answer as another writes it."""


LINES = (Path(__file__).parent / "answers.tsv").read_text().splitlines()[1:]
ANSWERS = [Answer(*line.replace("\\n#", "\n#").split("\t")) for line in LINES]

FORMULAS = [each for each in ANSWERS if each.kind != "sentence"]

OF_A_VALUE = {"number", "unit", "percentage", "sentence"}
"""Kinds of answers whose number is the answer."""

NUMBER = re.compile(r"(?<![\d.,:\w])-?\d+(?:\.\d+)?(?![\d:,_])")


@pytest.fixture(scope="module")
def verdicts() -> Iterator[Verdicts]:
    """Return a function to what `MathVerify` says about each completion, given the right answer in the data."""

    async def each_of(judge: Judge, *cases: tuple[Any, str]) -> list[float | None]:
        return [await judge(completion(answer, text)) for answer, text in cases]

    with start_blocking_portal() as portal, portal.wrap_async_context_manager(MathVerify().open()) as judge:
        yield partial(portal.call, each_of, judge)


def completion(answer: Any, text: str) -> RewardInput:
    group = answering(text, meta={"row": {"answer": answer}})
    return RewardInput(trajectory=group[0], score=0.0, text=text, meta={"row": {"answer": answer}})


EVERY = pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)])
"""`make test` looks at every third answer."""


def judged(verdicts: Verdicts, cases: list[tuple[Any, str]], expected: float) -> None:
    """Expect the same verdict of all cases, and name those that have another."""
    found = verdicts(*cases)
    assert [case for case, verdict in zip(cases, found, strict=True) if verdict != expected] == []


@EVERY
def test_an_answer_equals_itself_in_a_box_between_dollar_signs_and_in_another_notation(
    verdicts: Verdicts, every: int
) -> None:
    boxed = [(each.text, rf"So it is \boxed{{{each.text}}}.") for each in FORMULAS if "boxed" not in each.text]
    marked = [(each.text, f"It is ${each.text.strip('$')}$") for each in FORMULAS if "\\(" not in each.text]
    other = [(each.text, rf"\boxed{{{each.notation}}}") for each in ANSWERS if each.notation]

    judged(verdicts, [*boxed[::every], *marked[every // 3 :: every], *other[every // 2 :: every]], 1)


@EVERY
def test_a_lone_number_of_an_answer_is_another_answer(verdicts: Verdicts, every: int) -> None:
    numbers = [(each.text, n) for each in ANSWERS if each.kind not in OF_A_VALUE for n in NUMBER.findall(each.text)]
    equal = {each.text: each.notation for each in ANSWERS}

    assert len(numbers) > 60
    others = [(text, rf"\boxed{{{n}}}") for text, n in numbers if n not in (text, equal[text])]
    judged(verdicts, others[::every], 0)


@pytest.mark.parametrize(
    "other",
    [r"3\sqrt{17}", *(pytest.param(other, marks=pytest.mark.long) for other in ("17", "seat", r"\text{Tuesday}"))],
)
@EVERY
def test_an_answer_equals_no_answer_of_another_row(other: str, verdicts: Verdicts, every: int) -> None:
    judged(verdicts, [(each.text, rf"\boxed{{{other}}}") for each in ANSWERS[::every]], 0)


def test_a_number_of_a_formula_without_dollar_signs_in_a_completion_is_no_answer(verdicts: Verdicts) -> None:
    judged(verdicts, [("3", r"The answer is 3\sqrt{13}."), ("13", r"It is $3\sqrt{13}$"), ("2", r"so \frac{1}{2}")], 0)
    judged(
        verdicts,
        [(r"3\sqrt{13}", r"The answer is 3\sqrt{13}."), ("1/2", r"so \frac{1}{2}."), ("5", "It is −x, or 5.")],
        1,
    )


DIFFERENT = [
    ("1 000", "0"),
    ("1 000", "1"),
    (r"33\frac{1}{3}\%", r"33\%"),
    ("1½", "1"),
    ("0.333...", "0"),
    ("2021-03-05", "2013"),
    ("12/25/2021", "2021"),
    ("14:05", "2.8"),
    ("101_2", "101"),
    ("0x1F", "0"),
    ("(1,2)", r"\{1,2\}"),
    (r"\{1,2\}", "(1,2)"),
    ("10 m", "10 km"),
    ("5 hours", r"5 \text{ minutes}"),
    ("5 million", "5"),
    ("Route 66", "66"),
    ("March 5, 2021", "March 6, 2021"),
    ("6:00 PM", "6:00 AM"),
]


def test_a_part_of_an_answer_and_the_same_number_of_another_unit_are_other_answers(verdicts: Verdicts) -> None:
    judged(verdicts, [(text, rf"\boxed{{{other}}}") for text, other in DIFFERENT], 0)


def test_a_box_that_cannot_be_read_has_no_answer_in_its_parts_or_before_it(verdicts: Verdicts) -> None:
    texts = [r"First $5$, then \boxed{\unknown{x}}", r"\boxed{5}, no: \boxed{}", r"5, or \boxed{5 \unknown{x} 7}"]

    judged(verdicts, [("5", text) for text in texts], 0)


def test_a_number_of_prose_is_read_whole(verdicts: Verdicts) -> None:
    whole = [
        ("3e8", "It is 3 × 10⁸ m/s."),
        ("2.5", "It is 2 1/2."),
        ("3\\pi", "It is 3π."),
        ("1000000", "It is 1 million."),
    ]

    judged(verdicts, whole, 1)
    judged(verdicts, [(part, text) for (_, text), part in zip(whole, ("3", "2", "3", "1"), strict=True)], 0)


def test_a_list_has_several_right_answers(verdicts: Verdicts) -> None:
    given: list[tuple[Any, str, float | None]] = [
        (["1/2", "0.7"], "0.7", 1),
        ([3, 4.5, None], r"\boxed{4.5}", 1),
        (("east", "west"), r"\boxed{West}", 1),
        (["1", ""], "2", 0),
        (["", None], "2", None),
        ([], "2", None),
        (None, "2", None),
        (1e-07, "0.0000001", 1),
        (True, r"\boxed{true}", 1),
    ]

    found = verdicts(*((answers, text) for answers, text, _ in given))

    assert found == [verdict for *_, verdict in given]


def test_an_answer_of_another_type_is_an_error_with_its_column(verdicts: Verdicts) -> None:
    with pytest.raises(InvalidData, match=r"answer: expected an answer that is text or a number, .* got \{'a': 1\}"):
        verdicts(({"a": 1}, "1"))
