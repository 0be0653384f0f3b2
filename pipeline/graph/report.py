"""The report of a run: its result, the balance of its ledger, and the statistics at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ..accounting.balance import Balance
from .statistics import PipelineStatistics

if TYPE_CHECKING:
    from rich.console import RenderableType


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run."""

    stop_reason: str
    """`end of stream`, `SinkTrainer returned`, `stopped by SIGTERM`, `cancelled`, or the failure in a line:
    `opening failed: …` where no stage had begun."""
    seconds: float
    balance: Balance
    """The ledger's balance at the end: trajectories that were in flight are counted as unfinished, and as lost where a
    failure ended the run."""
    in_flight: int
    """Trajectories that were in flight when the run ended, and were counted so."""
    steps: int = 0
    """Optimizer steps done, those before a resumption included."""
    nothing_learned: str = ""
    """The part that was the same in all steps, if no step of this run had a gradient from rewards; else empty."""
    folder: str = ""
    """The folder of the run; "" for a run without one."""
    checkpoint: str = ""
    """Path of the last checkpoint that this run wrote; "" if it wrote none."""
    statistics: PipelineStatistics
    """The statistics at the end of the run."""

    @property
    def to_resume(self) -> str:
        """The way to resume the run, as a sentence."""
        if self.folder:
            return f"start the script again: it continues from the newest checkpoint in {self.folder}"
        if self.checkpoint:
            return f"call trainer.resume({self.checkpoint!r}) before the run"
        return "not possible: the next run starts from the beginning"

    def __str__(self) -> str:
        """Return the result as tables, in plain text."""
        from .report_table import plain  # noqa: PLC0415 (rich takes 50 ms, and most processes print no report)

        return plain(self._facts(), self.balance, self.statistics.stages)

    def __rich__(self) -> RenderableType:
        """Return the result as tables, for rich."""
        from .report_table import tables  # noqa: PLC0415 (as above)

        return tables(self._facts(), self.balance, self.statistics.stages)

    def _facts(self) -> dict[str, str]:
        learned = {"learned": f"nothing: {self.nothing_learned}"} if self.nothing_learned else {}
        return {
            "ended": self.stop_reason,
            "seconds": f"{self.seconds:,.1f}",
            "steps": f"{self.steps:,}",
            **learned,
            "checkpoint": self.checkpoint or "none",
            "to resume": self.to_resume,
        }
