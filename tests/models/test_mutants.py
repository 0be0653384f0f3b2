"""Every rule can fail: a core with one small fault breaks a named rule.

A search or a machine that finds nothing proves something only if it finds what is there; tests/models/mutants.py puts
it there.
"""

from __future__ import annotations

import pytest
from tests.models import (
    accounting_machine,
    channel_model,
    group_buffer_machine,
    group_buffer_model,
    ledger_machine,
    memory_machine,
    slot_machine,
    waiting_machine,
)
from tests.models.explore import Broken
from tests.models.mutants import MUTANTS, Mutant

FIRST = {mutant.by.name: number for number, mutant in reversed(list(enumerate(MUTANTS)))}
"""The first fault that each search or machine finds."""


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, id=str(mutant), marks=[pytest.mark.long] if FIRST[mutant.by.name] != number else [])
        for number, mutant in enumerate(MUTANTS)
    ],
)
def test_a_fault_breaks_the_rule_that_forbids_it(mutant: Mutant) -> None:
    with pytest.raises(Broken) as caught:
        mutant.by.look()

    assert caught.value.rule in {mutant.rule, mutant.or_rule}


def test_every_rule_can_fail() -> None:
    rules = {
        *channel_model.RULES,
        *slot_machine.SLOT_RULES,
        *ledger_machine.LEDGER_RULES,
        *waiting_machine.WAITING_RULES,
        *memory_machine.MEMORY_RULES,
        *accounting_machine.ACCOUNTING_RULES,
        *group_buffer_machine.ASSEMBLY_RULES,
        *group_buffer_model.RULES,
    }

    assert rules == {mutant.rule for mutant in MUTANTS}
