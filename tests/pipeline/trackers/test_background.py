"""Trackers that raise, block or lag behind a run."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import pytest
from structlog.testing import capture_logs
from tests.failsafe import FAILSAFE_S
from tests.pipeline.view.watched import STEPS, small_run

from penstock.errors import StageFailed
from penstock.trackers import Jsonl, RunInfo, Sample


@dataclass
class Recorder:
    """Notes its calls; raises in those that are named, and waits in `log` until it is released."""

    raises: Sequence[str] = ()
    released: threading.Event | None = None
    calls: list[tuple[str, object]] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)

    def _note(self, name: str, value: object) -> None:
        self.threads.add(threading.get_ident())
        self.calls.append((name, value))
        if name in self.raises:
            raise ConnectionError(f"no network for {name}")

    def start(self, run: RunInfo) -> None:
        self._note("start", run)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        assert metrics["reward"] == 1
        if self.released is not None:
            self.released.wait(FAILSAFE_S)
        self._note("log", step)

    def samples(self, samples: Sequence[Sample], step: int) -> None:
        self._note("samples", (step, len(samples)))

    def close(self, ok: bool) -> None:  # noqa: FBT001 (the protocol's)
        self._note("close", ok)


async def test_a_tracker_gets_everything_in_order_in_one_thread() -> None:
    tracker = Recorder()

    await small_run().run(trackers=[tracker], config={"lr": 0.5})

    assert tracker.calls[0] == ("start", RunInfo(name="run", config={"lr": 0.5}))
    steps: list[tuple[str, object]] = [("log", step) for step in range(1, STEPS + 1)]
    steps.insert(1, ("samples", (1, 2)))
    assert tracker.calls[1:] == [*steps, ("samples", (STEPS, 2)), ("close", True)]
    assert len(tracker.threads) == 1
    assert threading.get_ident() not in tracker.threads


async def test_a_tracker_that_raises_ends_no_run_is_named_once_and_then_counted() -> None:
    failing, other = Recorder(raises=["log", "samples"]), Recorder()

    with capture_logs() as logs:
        report = await small_run().run(trackers=[failing, other])

    assert report.steps == STEPS
    assert len(other.calls) == len(failing.calls) == STEPS + 4
    told = [entry for entry in logs if entry["event"] == "tracker_failed"]
    assert told[0]["tracker"] == "Recorder"
    assert "exc_info" in told[0]
    assert not any(entry.get("exc_info") for entry in told[1:])
    (end,) = [entry for entry in logs if entry["event"] == "tracker_incomplete"]
    assert (end["failed"], end["left_out"]) == (STEPS + 2, 0)


async def test_a_tracker_that_cannot_start_is_asked_for_nothing_more() -> None:
    tracker = Recorder(raises=["start"])

    with capture_logs() as logs:
        await small_run().run(trackers=[tracker])

    assert [name for name, _ in tracker.calls] == ["start"]
    assert [entry["failed"] for entry in logs if entry["event"] == "tracker_incomplete"] == [1 + STEPS + 2 + 1]


async def test_a_tracker_that_hangs_delays_no_step_and_holds_up_the_end_within_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock._pipeline.trackers.background.CAPACITY", 2)
    monkeypatch.setattr("penstock._pipeline.trackers.background.FINISH_TIMEOUT_S", 0.01)
    tracker = Recorder(released=threading.Event())

    with capture_logs() as logs, anyio.fail_after(FAILSAFE_S):
        report = await small_run().run(trackers=[tracker])
    assert tracker.released is not None
    tracker.released.set()

    assert report.steps == STEPS
    events = {entry["event"]: entry for entry in logs}
    assert events["tracker_too_slow"]["tracker"] == "Recorder"
    assert events["tracker_close_timeout"]["tracker"] == "Recorder"
    assert events["tracker_incomplete"]["left_out"] > 0


async def test_a_tracker_that_hangs_with_a_full_queue_delays_the_end_by_one_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock._pipeline.trackers.background.CAPACITY", 1)
    monkeypatch.setattr("penstock._pipeline.trackers.background.FINISH_TIMEOUT_S", 1.0)
    tracker = Recorder(released=threading.Event())

    began = anyio.current_time()
    with capture_logs():
        await small_run().run(trackers=[tracker])
    took_s = anyio.current_time() - began
    assert tracker.released is not None
    tracker.released.set()

    assert took_s < 2.0, "not once for the queue and once for the thread"


async def test_a_tracker_is_told_that_a_run_failed() -> None:
    tracker = Recorder()

    with pytest.raises(StageFailed):
        await small_run("fail").run(trackers=[tracker])

    assert tracker.calls[-1] == ("close", False)


async def test_what_is_no_tracker_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^trackers: expected objects with start\(run\), .* got 'wandb'$"):
        await small_run().run(trackers=["wandb"])  # type: ignore[list-item]


async def test_a_run_without_a_folder_can_write_lines(tmp_path: Path) -> None:
    await small_run().run(trackers=[Jsonl(tmp_path)])

    assert len((tmp_path / "metrics.jsonl").read_bytes().splitlines()) == STEPS
    assert len((tmp_path / "samples.jsonl").read_bytes().splitlines()) == 4
