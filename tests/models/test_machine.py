"""How machines are run: the same steps every time."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis.stateful import RuleBasedStateMachine, rule
from tests.models.machine import PICKS, run


class _Notes(RuleBasedStateMachine):
    """Notes what is drawn."""

    drawn: list[int]

    @rule(pick=PICKS)
    def draw(self, pick: int) -> None:
        self.drawn.append(pick)


def _drawn() -> list[int]:
    _Notes.drawn = []
    run(_Notes, runs=20, steps=20)
    return _Notes.drawn


def test_the_steps_are_the_same_whatever_was_imported_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = _drawn()
    module = ModuleType("numbers_of_another")
    module.__file__ = str(tmp_path / "numbers_of_another.py")
    Path(module.__file__).write_text(f"NUMBERS = {list(range(1_000, 2_000))}\n")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    assert _drawn() == alone
