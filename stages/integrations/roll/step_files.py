"""`StepFiles`: the state of a flow after each optimizer step of ROLL, in files beside ROLL's checkpoints.

    <output_dir>/penstock/<tag>/12.json       trajectories trained up to step 12, and the state of the stages
    <output_dir>/penstock/<tag>/balance.json  the counts of the ledger, once ROLL has stopped the flow

ROLL's own checkpoint of a step is complete before the file of that step is written. A run that is killed between the
two resumes from the file of the step before: trajectories of the last step may be trained again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...._pipeline.accounting.balance import Balance
from ...._pipeline.accounting.telemetry import get_logger
from ...._pipeline.util.json_file import read_json, write_json

log = get_logger("penstock.roll")


class StepFiles:
    """The files of one flow."""

    def __init__(self, folder: Path, save_steps: int) -> None:
        """Use `folder`; `save_steps` is ROLL's: its multiples have a checkpoint."""
        self._folder = folder
        self._save_steps = save_steps

    def load(self, step: int) -> Mapping[str, Any] | None:
        """Return the state after `step` (ROLL resumes with it), or after an earlier one; None without any.

        Raises:
            FileDamaged: the file is damaged.
        """
        found = max((each for each in self._steps() if each <= step), default=None)
        if found != step:
            log.warning(
                "resumed_without_ledger",
                step=step,
                found=found,
                consequence="prompts that were trained since may be trained again",
            )
        if found is None:
            return None
        return read_json(self._path(found), dict[str, Any], remedy="remove it: the state of an earlier step is used")

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Write the state after `step`, and remove those that no checkpoint of ROLL needs."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_json(self._path(step), state)
        for old in self._steps():
            if old < step and old % self._save_steps:
                self._path(old).unlink(missing_ok=True)

    def save_balance(self, balance: Balance) -> None:
        """Write the counts of the ledger."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_json(self._folder / "balance.json", balance)

    def clear(self) -> None:
        """Remove the files of an earlier run: ROLL begins at its first step."""
        for step in self._steps():
            self._path(step).unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return self._folder / f"{step}.json"

    def _steps(self) -> list[int]:
        return [int(path.stem) for path in self._folder.glob("*.json") if path.stem.isdecimal()]
