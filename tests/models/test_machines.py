"""The sans-I/O cores against naive pictures of themselves, under many random steps: the same ones every time."""

from __future__ import annotations

import pytest
from tests.models.accounting_machine import RelayMachine, SourceMachine
from tests.models.group_buffer_machine import AssemblyMachine
from tests.models.ledger_machine import LedgerMachine
from tests.models.machine import Machine, run
from tests.models.memory_machine import MemoryMachine
from tests.models.slot_machine import SlotMachine
from tests.models.waiting_machine import WaitingMachine


@pytest.mark.parametrize(
    ("machine", "runs"),
    [
        pytest.param(SlotMachine, 80, id="slot_table"),
        pytest.param(WaitingMachine, 80, id="waiters"),
        pytest.param(MemoryMachine, 80, id="memory_channel"),
        pytest.param(AssemblyMachine, 40, id="assembly"),
        pytest.param(LedgerMachine, 60, id="ledger_and_accounts"),
        pytest.param(SourceMachine, 60, id="books_of_sources"),
        pytest.param(RelayMachine, 60, id="books_of_middle_stages"),
    ],
)
def test_a_core_does_what_its_naive_picture_does(machine: Machine, runs: int) -> None:
    run(machine, runs=runs, steps=50)
