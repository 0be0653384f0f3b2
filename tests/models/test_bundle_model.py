"""Every interleaving of writing, flushing, reading and releasing records that share spans, and of a crash."""

from __future__ import annotations

from typing import Any

import pytest
from tests.models.bundle_faults import BUNDLERS, TABLES
from tests.models.bundle_model import search
from tests.models.explore import Broken

SCOPES: dict[tuple[int, ...], int] = {(1, 1, 1, 1): 7436, (1, 2, 3, 1): 1429, (3, 2, 1, 2): 2253}
"""Half slots of each record, and the number of states; see `tests/models/test_channel_model.py`."""


@pytest.mark.parametrize(
    "halves",
    [pytest.param(halves, marks=[pytest.mark.long] if states > 2_000 else []) for halves, states in SCOPES.items()],
)
def test_every_rule_holds_in_every_state(halves: tuple[int, ...]) -> None:
    assert search(halves) == SCOPES[halves]


FAULTS: list[tuple[dict[str, Any], str]] = [
    *(({"table": table}, rule) for table, rule in TABLES.items()),
    *(({"bundler": bundler}, rule) for bundler, rule in BUNDLERS.items()),
]


@pytest.mark.parametrize(("fault", "rule"), FAULTS, ids=str)
def test_a_fault_of_the_table_or_around_it_breaks_its_rule(fault: dict[str, Any], rule: str) -> None:
    with pytest.raises(Broken) as broken:
        search((1, 2, 3, 1), **fault)

    assert broken.value.rule == rule
