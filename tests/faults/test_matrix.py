"""The kill matrix: every role struck by every fault in every moment that makes sense, as real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from tests.faults.cells import CELLS, COMBINATIONS, SENSELESS, Cell, Moment, Role, why_not
from tests.faults.mutants import MUTANTS
from tests.faults.zygote import Zygote

AT_A_TIME = 3
"""Cells that are played side by side: they wait more than they compute. One, and those that come after it, never all:
where tests are shared out among processes, each would play all cells, and a test wait for those of the others."""


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as started:
        yield started


@pytest.fixture(scope="module")
def verdict(request: pytest.FixtureRequest, zygote: Zygote) -> Iterator[Callable[[Cell], str]]:
    """What was wrong in a cell. The ones that are asked for next are played meanwhile."""
    wanted = [cell for item in request.session.items if isinstance(cell := _parameters(item).get("cell"), Cell)]
    playing: dict[Cell, Future[str]] = {}
    with ThreadPoolExecutor(AT_A_TIME) as threads:

        def wrong_in(cell: Cell) -> str:
            at = wanted.index(cell)
            for each in wanted[at : at + AT_A_TIME]:
                if each not in playing:
                    playing[each] = threads.submit(zygote.play, each)
            return playing[cell].result()

        yield wrong_in


PLAYED_IN: dict[Role, Moment] = {
    "producer": "published",
    "consumer": "reading",
    "middle": "reading",
    "supervisor": "committing",
}
"""`make test` plays SIGKILL in every moment, and every other fault in one moment of each role."""


def _mark(cell: Cell) -> Sequence[pytest.MarkDecorator]:
    return [pytest.mark.long] if cell.fault != "SIGKILL" and cell.moment != PLAYED_IN[cell.role] else []


def _mark_of_mutant(mutant: Callable[[], None]) -> Sequence[pytest.MarkDecorator]:
    """Those in which a worker starts are longer: of them `make test` plays those of one moment."""
    cell, _ = MUTANTS[mutant]
    return [pytest.mark.long] if cell.role == "middle" and cell.moment != "reading" else []


def _parameters(item: pytest.Item) -> dict[str, object]:
    return getattr(getattr(item, "callspec", None), "params", {})


@pytest.mark.parametrize("cell", [pytest.param(cell, marks=_mark(cell), id=str(cell)) for cell in CELLS])
def test_nothing_is_lost_silently_doubled_or_left_behind(cell: Cell, verdict: Callable[[Cell], str]) -> None:
    assert not verdict(cell)


@pytest.mark.parametrize(
    "mutant", [pytest.param(mutant, marks=_mark_of_mutant(mutant), id=mutant.__name__) for mutant in MUTANTS]
)
def test_what_the_matrix_is_there_for_it_notices(mutant: Callable[[], None], zygote: Zygote) -> None:
    cell, wrong = MUTANTS[mutant]

    assert wrong in zygote.play(cell, mutant.__name__)


def test_what_is_not_played_makes_no_sense_for_a_reason_that_is_given() -> None:
    left_out = {cell: why_not(cell) for cell in COMBINATIONS if cell not in CELLS}

    assert set(left_out.values()) == set(SENSELESS.values())
    assert len(CELLS) + len(left_out) == 4 * 6 * 6
