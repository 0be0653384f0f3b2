import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import structlog

from penstock.accounting import JsonlMetrics, Metrics, get_logger


def test_means_are_sums_over_sums_not_means_of_means() -> None:
    metrics = Metrics()
    metrics.mean("reward", [1.0, 0.0, 0.0])
    metrics.mean("reward", [1.0])
    metrics.mean("entropy", [2.0, 4.0], weight=[3, 1])
    emitted = metrics.emit(1)
    assert emitted["reward"] == 0.5
    assert emitted["entropy"] == 2.5


def test_totals_add_extremes_stand_out_and_gauges_stay() -> None:
    metrics = Metrics()
    metrics.total("dropped/stale", 2)
    metrics.total("dropped/stale")
    metrics.maximum("staleness/max", np.array([1, 5]))
    metrics.minimum("staleness/min", [3, 2])
    metrics.maximum("nothing", [])
    metrics.gauge("lag", 3)
    first, second = metrics.emit(1), metrics.emit(2)
    assert {k: v for k, v in first.items() if not k.startswith("perf/")} == {
        "dropped/stale": 3,
        "staleness/max": 5,
        "staleness/min": 2,
        "lag": 3,
    }
    assert second.keys() == {"lag", "perf/time_per_step"}


def test_what_a_worker_observed_is_added_to_what_the_trainer_did() -> None:
    worker, trainer = Metrics(), Metrics()
    worker.mean("reward", [1.0, 1.0, 1.0])
    worker.total("rollouts", 3)
    worker.maximum("length/max", 9)
    worker.minimum("length/min", 2)
    worker.gauge("version", 4)
    trainer.mean("reward", [0.0])
    trainer.maximum("length/max", 7)

    trainer.merge(worker.take())

    assert not worker
    emitted = trainer.emit(1)
    assert emitted["reward"] == 0.75
    assert (emitted["rollouts"], emitted["length/max"], emitted["length/min"], emitted["version"]) == (3, 9, 2, 4)


def test_every_sink_gets_every_step_and_the_extra_metrics() -> None:
    got: list[tuple[dict[str, float], int]] = []
    metrics = Metrics(lambda m, step: got.append((m, step)))
    metrics.emit(3, {"grad_norm": np.float32(2)})
    assert got[0][1] == 3
    assert got[0][0]["grad_norm"] == 2


def test_a_sink_that_raises_is_reported_once_and_never_ends_the_run() -> None:
    calls: list[int] = []

    def broken(_: dict[str, float], step: int) -> None:
        calls.append(step)
        raise OSError("disk full")

    metrics = Metrics(broken)
    with structlog.testing.capture_logs() as logged:
        metrics.emit(1)
        metrics.emit(2)
    assert calls == [1]
    assert [entry["event"] for entry in logged] == ["metric_sink_failed"]


def test_the_jsonl_sink_writes_one_object_a_step(tmp_path: Path) -> None:
    sink = JsonlMetrics(tmp_path / "run" / "metrics.jsonl")
    sink({"reward": 0.5}, 1)
    sink({"reward": float("nan")}, 2)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "reward": 0.5}, {"step": 2, "reward": None}]


# -- events --------------------------------------------------------------------------------------------------------


@pytest.fixture
def _unconfigured() -> Iterator[None]:
    before, was_configured = structlog.get_config(), structlog.is_configured()
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()
    if was_configured:
        structlog.configure(**before)


@pytest.mark.usefixtures("_unconfigured")
def test_events_go_to_the_standard_loggers_where_structlog_is_not_configured(caplog: pytest.LogCaptureFixture) -> None:
    log = get_logger("penstock.test")

    with caplog.at_level(logging.INFO):
        log.debug("unwanted")
        log.info("worker_started", worker="Sample 1/2", pid=7)
        log.bind(worker="Sample 2/2").warning("worker_died", share="50%")

    assert caplog.record_tuples == [
        ("penstock.test", logging.INFO, "worker_started worker='Sample 1/2' pid=7"),
        ("penstock.test", logging.WARNING, "worker_died worker='Sample 2/2' share='50%'"),
    ]


@pytest.mark.usefixtures("_unconfigured")
def test_an_exception_arrives_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    error = OSError("disk full")

    try:
        raise error
    except OSError:
        get_logger("penstock.test").exception("sink_failed", step=3)

    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.ERROR, "sink_failed step=3")
    assert record.exc_info is not None
    assert record.exc_info[1] is error


@pytest.mark.usefixtures("_unconfigured")
def test_events_go_where_structlog_is_configured_to_send_them_even_if_that_comes_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log, seen = get_logger("penstock.test"), structlog.testing.LogCapture()
    log.warning("before")

    structlog.configure(processors=[seen])
    log.warning("after", step=3)

    assert caplog.messages == ["before"]
    assert seen.entries == [{"event": "after", "step": 3, "log_level": "warning"}]


def test_a_script_that_configures_nothing_sees_warnings_on_stderr_and_nothing_on_stdout() -> None:
    script = "from penstock.accounting import get_logger; log = get_logger('penstock.x'); "
    script += "log.info('a'); log.warning('b', n=1)"

    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert (ran.stdout, ran.stderr) == ("", "b n=1\n")


@pytest.mark.parametrize(("after_step", "left"), [(2, b"12"), (9, b"123"), (0, b"")])
def test_a_run_that_goes_on_takes_back_the_lines_behind_its_checkpoint(
    tmp_path: Path, after_step: int, left: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlMetrics(path, after_step=0)
    for step in (1, 2, 3):
        sink({"loss": 0.5}, step)
    with path.open("ab") as file:
        file.write(b'{"step":4,"lo')  # it was killed

    JsonlMetrics(path, after_step=after_step)

    assert path.read_bytes() == b"".join(b'{"step":%c,"loss":0.5}\n' % step for step in left)
