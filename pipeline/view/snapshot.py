"""The content of a view at one moment, and its parts as text: shared by the table and the lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..accounting.balance import Balance
from ..accounting.ledger import Ledger
from ..diagnosis.finding import RunFinding
from ..diagnosis.running import RunningDiagnosis
from ..graph.report import Report
from ..graph.statistics import PipelineStatistics, WorkerStatistics
from .memory_use import NONE, MemoryUse, memory_use
from .progress import Progress, ProgressState

MINUTE_S, HOUR_S = 60, 3600

TWO_DIGITS = 10


@dataclass(frozen=True, slots=True)
class Watched:
    """A run that is watched."""

    progress: Progress
    ledger: Ledger
    statistics: Callable[[], PipelineStatistics]
    report: Callable[[], Report | None]
    """Returns the report once the run has ended, and None before."""
    diagnosis: RunningDiagnosis

    def snapshot(self) -> Snapshot:
        """Return the state now, without the parts of `completed`."""
        report = self.report()
        reason = "" if report is None else report.stop_reason
        return Snapshot(self.progress.state(self.ledger.step), self.statistics(), self.ledger.balance(), reason)

    def completed(self, shown: Snapshot) -> Snapshot:
        """Return a state with the memory in use and the gravest finding. Blocks: call it in a worker thread."""
        return replace(shown.with_memory(), finding=self.diagnosis.gravest())


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a run at one moment."""

    progress: ProgressState
    statistics: PipelineStatistics
    balance: Balance
    stop_reason: str = ""
    """The reason why the run has ended; "" while it goes on."""
    memory: MemoryUse = NONE
    finding: RunFinding | None = None
    """The gravest finding in the run so far."""

    def with_memory(self) -> Snapshot:
        """Return the same with the memory in use. Reads files: call it in a worker thread."""
        return replace(self, memory=memory_use(worker.pid for worker in self._alive() if worker.pid is not None))

    @property
    def ended(self) -> bool:
        """Return whether the run has ended, so that no time is left, whatever the last step would be."""
        return bool(self.stop_reason)

    def steps(self) -> str:
        """Return the present step, and the last one: `step 12/250`."""
        last = self.progress.max_steps
        return f"step {self.progress.step}" + (f"/{last}" if last is not None else "")

    def times(self) -> str:
        """Return the time so far and the time that is left: `34 s, 10 min left`."""
        left_s = None if self.ended else self.progress.left_s
        return duration(self.progress.seconds) + (f", {duration(left_s)} left" if left_s is not None else "")

    def speeds(self) -> list[str]:
        """Return the speeds that are known: `12,345 tokens/s`, `9.6 trajectories/s`."""
        return [f"{rate:,.{0 if rate >= TWO_DIGITS else 1}f} {unit}" for unit, rate in self.progress.rates.items()]

    def trajectories(self) -> str:
        """Return the balance of the ledger: `96 begun = 16 in flight + 64 trained + 16 filtered`."""
        ended = [f"{count:,} {state}" for state, count in self.balance.ended.items() if count]
        return f"{self.balance.admitted:,} begun = {' + '.join([f'{self.balance.in_flight:,} in flight', *ended])}"

    def memory_parts(self) -> list[str]:
        """Return the memory in use: `812 MiB here`, `1.2 GiB in 2 workers`, `GPU 0: 34.2/79.6 GiB`."""
        parts = [f"{size(self.memory.here_bytes)} here"]
        if workers := len(self._alive()):
            parts.append(f"{size(self.memory.workers_bytes)} in {workers} worker{'s' * (workers > 1)}")
        return parts + [
            f"GPU {number}: {use.used_bytes / 2**30:.1f}/{use.total_bytes / 2**30:.1f} GiB"
            for number, use in enumerate(self.memory.devices)
        ]

    def _alive(self) -> list[WorkerStatistics]:
        """Return the workers whose processes have not ended."""
        alive = {"starting", "running", "stopping"}
        return [worker for stage in self.statistics.stages for worker in stage.workers if worker.state in alive]


def number(value: float | None) -> str:
    """Return the value of a metric as short text; None is one that is not finite, as JSON has it."""
    return "nan" if value is None else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it: `34 s`, `12 min`, `3.4 h`."""
    if seconds < 2 * MINUTE_S:
        return f"{seconds:.0f} s"
    return f"{seconds / MINUTE_S:.0f} min" if seconds < 2 * HOUR_S else f"{seconds / HOUR_S:.1f} h"


def size(nbytes: int) -> str:
    """Return a number of bytes in the unit that suits it: `812 MiB`, `1.2 GiB`."""
    return f"{nbytes / 2**20:.0f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:.1f} GiB"
