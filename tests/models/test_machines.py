"""The sans-I/O cores against naive models, with many random steps, the same every time."""

from __future__ import annotations

import pytest
from tests.models.accounting_machine import AssignedMachine, RelayMachine, SourceMachine
from tests.models.group_buffer_machine import AssemblyMachine
from tests.models.ledger_machine import LedgerMachine
from tests.models.machine import Machine, run
from tests.models.memory_machine import MemoryMachine
from tests.models.slot_machine import SlotMachine
from tests.models.waiting_machine import WaitingMachine

MACHINES: dict[str, tuple[Machine, int]] = {
    "slot_table": (SlotMachine, 10),
    "waiters": (WaitingMachine, 10),
    "memory_channel": (MemoryMachine, 10),
    "assembly": (AssemblyMachine, 5),
    "ledger": (LedgerMachine, 8),
    "books_of_sources": (SourceMachine, 8),
    "books_of_middle_stages": (RelayMachine, 8),
    "books_of_assigned_prompts": (AssignedMachine, 8),
}
"""The machines, each with its number of runs in `make test`."""


@pytest.mark.parametrize("times", [1, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", MACHINES)
def test_a_core_agrees_with_its_naive_model(name: str, times: int) -> None:
    machine, runs = MACHINES[name]

    run(machine, runs=times * runs, steps=50)
