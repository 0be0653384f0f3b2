"""The kill matrix: every fault in every role at every moment that is possible, with real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import get_args

import pytest
from tests.faults.cells import CELLS, COMBINATIONS, EXCLUDED, Cell, Fault, Moment, Role, exclusion_reason
from tests.faults.mutants import MUTANTS
from tests.faults.zygote import Zygote

CELLS_AT_ONCE = 3
"""Cells that run at the same time: they wait more than they compute. One and the next ones, never all: where tests are
distributed among processes, each would run all cells, and a test would wait for those of the others."""


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as started:
        yield started


@pytest.fixture(scope="module")
def verdict(request: pytest.FixtureRequest, zygote: Zygote) -> Iterator[Callable[[Cell], str]]:
    """Return a function for the problems of a cell. The next cells run meanwhile."""
    wanted = [cell for item in request.session.items if isinstance(cell := _parameters(item).get("cell"), Cell)]
    playing: dict[Cell, Future[str]] = {}
    with ThreadPoolExecutor(CELLS_AT_ONCE) as threads:

        def problems_of(cell: Cell) -> str:
            at = wanted.index(cell)
            for each in wanted[at : at + CELLS_AT_ONCE]:
                if each not in playing:
                    playing[each] = threads.submit(zygote.run_cell, each)
            return playing[cell].result()

        yield problems_of


DIAGONAL = {
    Cell("producer", "SIGKILL", "published"),
    Cell("producer", "SIGTERM", "idle"),
    Cell("consumer", "SIGKILL", "reading"),
    Cell("consumer", "exception", "shutdown"),
    Cell("middle", "SIGKILL", "writing"),
    Cell("middle", "_exit", "committing"),
    Cell("middle", "zombie", "reading"),
    Cell("supervisor", "SIGKILL", "committing"),
    Cell("supervisor", "stall", "published"),
}
"""Cells of `make test`: SIGKILL in every role, and every fault and moment once; `make test-all` runs every cell."""


def _mark(cell: Cell) -> Sequence[pytest.MarkDecorator]:
    return [] if cell in DIAGONAL else [pytest.mark.long]


def _mark_of_mutant(mutant: Callable[[], None]) -> Sequence[pytest.MarkDecorator]:
    """Mark cells that start a worker as long, except those of one moment."""
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
def test_the_matrix_detects_each_mutation(mutant: Callable[[], None], zygote: Zygote) -> None:
    cell, wrong = MUTANTS[mutant]

    assert wrong in zygote.run_cell(cell, mutant.__name__)


def test_each_excluded_combination_has_a_reason() -> None:
    left_out = {cell: exclusion_reason(cell) for cell in COMBINATIONS if cell not in CELLS}

    assert set(left_out.values()) == set(EXCLUDED.values())
    assert len(CELLS) + len(left_out) == 4 * 6 * 6


def test_the_diagonal_has_a_kill_in_every_role_and_every_fault_and_moment() -> None:
    assert set(CELLS) >= DIAGONAL
    assert {cell.role for cell in DIAGONAL if cell.fault == "SIGKILL"} == set(get_args(Role))
    assert {cell.fault for cell in DIAGONAL} == set(get_args(Fault))
    assert {cell.moment for cell in DIAGONAL} == set(get_args(Moment))
