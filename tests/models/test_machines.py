"""The sans-I/O cores against naive models, with many random steps, the same every time."""

from __future__ import annotations

import pytest
from tests.cells import cells
from tests.models.accounting_machine import AssignedMachine, RelayMachine, SourceMachine
from tests.models.group_buffer_machine import AssemblyMachine
from tests.models.ledger_machine import LedgerMachine
from tests.models.machine import Machine, run
from tests.models.memory_machine import MemoryMachine
from tests.models.slot_machine import SlotMachine
from tests.models.waiting_machine import WaitingMachine

MACHINES: dict[str, tuple[Machine, int]] = {
    "slot_table": (SlotMachine, 5),
    "waiters": (WaitingMachine, 5),
    "memory_channel": (MemoryMachine, 5),
    "assembly": (AssemblyMachine, 3),
    "ledger": (LedgerMachine, 4),
    "books_of_sources": (SourceMachine, 4),
    "books_of_middle_stages": (RelayMachine, 4),
    "books_of_assigned_prompts": (AssignedMachine, 4),
}
"""The machines, each with its number of runs in `make test`."""


@pytest.mark.parametrize("times", cells([1, 16], run=[1]))
@pytest.mark.parametrize("name", MACHINES)
def test_a_core_agrees_with_its_naive_model(name: str, times: int) -> None:
    machine, runs = MACHINES[name]

    run(machine, runs=times * runs, steps=50)
