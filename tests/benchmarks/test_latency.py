"""The benchmark of latencies: what a peer does to the rest of a run."""

from __future__ import annotations

from functools import partial

import pytest
from benchmarks import latency
from benchmarks.contestants import Absent, Case, Outcome
from rich.console import Console


def measured(_: Case) -> Outcome:
    return Outcome(1000.0, 1.0, 2.0)


def fails(error: Exception, _: Case) -> Outcome:
    raise error


def test_a_peer_that_is_absent_or_fails_leaves_a_line_and_the_rest_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = {
        "iceoryx2-event": partial(fails, Absent("pip install iceoryx2")),
        "iceoryx2-spin": partial(fails, RuntimeError("producer 0 ended with exit code 1")),
    }
    monkeypatch.setattr(latency, "CONTESTANTS", {"penstock": measured} | peers)
    monkeypatch.setattr(latency, "beside_sink_trainer", measured)

    tables = latency.measure(seconds=0.1, repeats=2)
    tables[0].print(Console(width=80))

    shown = capsys.readouterr().out
    assert [[row["what"] for row in table.rows()] for table in tables] == [
        ["penstock"],
        ["10,000/s", "38,000/s", "100,000/s", "189,000/s"],
        ["SinkTrainer", "bare channel"],
    ]
    assert "iceoryx2-event skipped: pip install iceoryx2\n" in shown
    assert "iceoryx2-spin failed: RuntimeError: producer 0 ended with exit code 1\n" in shown


def test_penstock_that_fails_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "CONTESTANTS", {"penstock": partial(fails, RuntimeError("lost"))})

    with pytest.raises(RuntimeError, match="lost"):
        latency.measure(seconds=0.1, repeats=1)
