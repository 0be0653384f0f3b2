"""Record one run of the demo, and keep it in the folder `runs/<time>/`, to which `runs/latest` points.

The record is updated during the run, so it exists however the run ends.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import anyio
import msgspec
from safetensors.torch import save_file

from penstock import Pipeline, Report
from penstock.accounting import JsonlMetrics, Metrics

from .exam import final_exam, quiz
from .model import Transformer

__all__ = ["Run", "Summary"]

RECENT = 10
"""Optimizer steps over which the reward is averaged."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The content of summary.json."""

    accuracy_before: float | None
    """Share of the final exam's problems solved after the warm-up; null if the run ended before."""
    accuracy_after: float
    """The same when training ended."""
    seconds: float
    """From the start of the warm-up to the end of training."""
    seconds_warm_up: float
    seed: int
    steps: int
    """Optimizer steps of reinforcement."""
    trajectories: int
    """Trajectories that an optimizer step trained."""
    stop_reason: str
    ledger: dict[str, Any]
    """{admitted, in_flight, ended: {state: count}}."""


class Run:
    """One run of the demo."""

    def __init__(self, seed: int, model: Transformer, runs: Path = Path("runs")) -> None:
        self.seed = seed
        self.model = model
        self.folder = _new_folder(runs)
        (self.folder / "metrics.jsonl").touch()
        self.metrics = Metrics(JsonlMetrics(self.folder / "metrics.jsonl"), self.note)
        """Metrics for the pipeline: every step is written to the file, and recorded here."""
        self.steps: list[dict[str, float]] = []
        """The metrics of every optimizer step so far."""
        self.rewards: list[float] = []
        """Mean raw score of recently sampled trajectories, by optimizer step."""
        self._sampled: deque[tuple[float, float]] = deque(maxlen=RECENT)
        """Trajectories that arrived before each of the last steps, and the sum of their scores."""
        self.accuracies: dict[int, float] = {}
        """Accuracy in the quiz, by optimizer step; step 0 is after the warm-up."""
        self._before: float | None = None
        """Accuracy in the final exam after the warm-up."""
        self.pipeline: Pipeline | None = None
        self.stop_reason = ""
        """Reason for the end of training; empty before it."""
        self._listeners: list[Callable[[], None]] = []
        self._began = time.monotonic()
        self._warm_s = 0.0
        self._ended_s = 0.0

    @property
    def seconds(self) -> float:
        """Return the duration of the run so far."""
        return self._ended_s or time.monotonic() - self._began

    @property
    def accuracy(self) -> float:
        """Return the last accuracy in the quiz; 0 before the first one."""
        return next(reversed(self.accuracies.values()), 0.0)

    def on_step(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every optimizer step."""
        self._listeners.append(listener)

    def stop_at(self, target: float, scope: anyio.CancelScope) -> None:
        """Cancel `scope` once the accuracy reaches `target`."""

        def stop() -> None:
            if self.accuracy >= target:
                self.end(f"{target:.0%} of the held-out problems solved")
                scope.cancel()

        self.on_step(stop)

    def stop_after(self, seconds: float, scope: anyio.CancelScope) -> None:
        """Cancel `scope` so many seconds after the first optimizer step."""

        def begin() -> None:
            if len(self.steps) == 1:
                scope.deadline = anyio.current_time() + seconds

        self.on_step(begin)

    def warmed_up(self) -> None:
        """Record the accuracies after the warm-up."""
        self._warm_s = self.seconds
        self.accuracies[0] = quiz(self.model)
        self._before = final_exam(self.model)

    def note(self, metrics: dict[str, float], step: int) -> None:
        """Record the metrics of an optimizer step; see `MetricSink`."""
        self.steps.append(metrics)
        arrived = metrics.get("rollout/trajectories", 0.0)
        self._sampled.append((arrived, arrived * metrics.get("rollout/reward", 0.0)))
        trajectories, scores = (sum(column) for column in zip(*self._sampled, strict=True))
        self.rewards.append(scores / trajectories if trajectories else metrics["reward"])
        if "accuracy" in metrics:
            self.accuracies[step] = metrics["accuracy"]
        for listener in self._listeners:
            listener()

    def end(self, reason: str) -> None:
        """Record the reason for the end of training; the first one counts."""
        self.stop_reason = self.stop_reason or reason
        self._ended_s = self._ended_s or self.seconds

    @property
    def report(self) -> Report | None:
        """Return the report of the pipeline; None if it has not run."""
        return self.pipeline.report if self.pipeline else None

    def keep(self) -> Summary:
        """Write weights, summary and picture; metrics.jsonl was written during the run."""
        summary = self._summary()
        save_file(self.model.state_dict(), self.folder / "weights.safetensors")
        encoded = msgspec.json.format(msgspec.json.encode(summary), indent=2)
        (self.folder / "summary.json").write_bytes(encoded + b"\n")
        self._draw(self.folder / "reward.png")
        return summary

    def _summary(self) -> Summary:
        balance = self.report.balance if self.report else None
        ended = balance.ended if balance else {}
        return Summary(
            accuracy_before=self._before,
            accuracy_after=final_exam(self.model),
            seconds=round(self.seconds, 2),
            seconds_warm_up=round(self._warm_s or self.seconds, 2),
            seed=self.seed,
            steps=len(self.steps),
            trajectories=ended.get("trained", 0),
            stop_reason=self.stop_reason,
            ledger={
                "admitted": balance.admitted if balance else 0,
                "in_flight": balance.in_flight if balance else 0,
                "ended": ended,
            },
        )

    def _draw(self, path: Path) -> None:
        """Draw the reward of every step and the accuracy of every quiz."""
        from matplotlib.figure import Figure  # noqa: PLC0415 (half a second, and only at the end)

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(range(1, len(self.rewards) + 1), self.rewards, label="reward, sampled")
        axes.plot(list(self.accuracies), list(self.accuracies.values()), "o-", label="accuracy, held out, greedy")
        axes.set(xlabel="optimizer step", ylim=(0, 1), title=f"chain_sum, seed {self.seed}")
        axes.legend(loc="lower right")
        axes.grid(alpha=0.3)
        figure.savefig(path, dpi=120)


def _new_folder(runs: Path) -> Path:
    """Create `runs/<time>/` and point `runs/latest` to it."""
    runs.mkdir(parents=True, exist_ok=True)
    stamp = datetime.now().astimezone().strftime("%Y-%m-%d_%H-%M-%S")
    names = [stamp, *(f"{stamp}_{number}" for number in range(2, 100))]
    folder = next(runs / name for name in names if not (runs / name).exists())
    folder.mkdir()
    pointer = runs / f".latest-{folder.name}"
    pointer.symlink_to(folder.name)
    pointer.replace(runs / "latest")
    return folder
