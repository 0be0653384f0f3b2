"""The harness that all contestants share, with real processes and small cases."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from benchmarks import transport
from benchmarks.contestants import CONTESTANTS, Absent, Case, Outcome
from benchmarks.contestants.harness import decode_header, encode_header, flat_parts, need, race, read_flat
from benchmarks.contestants.mp_queue import connect_queue, serve_queue
from benchmarks.records import WrongContents, make_groups, plain
from rich.console import Console
from tests.benchmarks.contestants_for_tests import connect_forgetfully, serve_late
from tests.faults.zygote import ROOT, environment

SMALL = Case(producers=2, group=2, tokens=64, seconds=0.2)


@pytest.mark.parametrize("name", ["penstock", pytest.param("mp-queue", marks=pytest.mark.long)])
@pytest.mark.long
def test_a_contestant_delivers_the_sent_records_and_is_timed(name: str) -> None:
    flood = CONTESTANTS[name](SMALL)
    ping = CONTESTANTS[name](SMALL.pinging())

    assert flood.trajectories_per_s > 0
    assert 0 < ping.p50_us <= ping.p99_us


@pytest.mark.long
def test_a_contestant_that_loses_a_record_is_caught() -> None:
    with pytest.raises(WrongContents, match=r"expected group 7 .* got 8"):
        race(SMALL, serve_queue, connect_forgetfully)


@pytest.mark.long
def test_the_last_records_are_waited_for_after_their_senders_have_ended() -> None:
    assert race(SMALL, serve_late, connect_queue).trajectories_per_s > 0


MEASURING = """
from benchmarks.contestants.harness import producing
from tests.benchmarks.contestants_for_tests import say_who_and_wait

with producing(say_who_and_wait, [()]) as processes:
    processes[0].join()
"""


def test_a_producer_ends_with_the_process_that_measures_it() -> None:
    command = [sys.executable, "-c", MEASURING]
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE) as measuring:
        assert measuring.stdout is not None
        producer = os.pidfd_open(int(measuring.stdout.readline()))
        measuring.kill()

        died = bool(select.select([producer], [], [], 30)[0])
        if not died:
            signal.pidfd_send_signal(producer, signal.SIGKILL)
        os.close(producer)
        assert died


def test_a_record_as_bytes_comes_back_as_it_was() -> None:
    record = plain(make_groups(1, group=2, tokens=64)[1])

    parts, nbytes = flat_parts(record)
    flat = read_flat(memoryview(b"".join(parts)))
    framed = decode_header(encode_header(record), record.columns)

    assert nbytes == sum(len(part) for part in parts)
    for back in flat, framed:
        assert (back.env, back.instance_id, back.meta) == (record.env, record.instance_id, record.meta)
        assert (back.rows == record.rows).all()
        assert [bytes(c) for c in back.columns] == [c.tobytes() for c in record.columns]


def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(Absent, match="pip install no-such-package"):
        need("no_such_module.part", "no-such-package")


def test_results_contain_medians_ranges_and_skipped_contestants(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tcp = {"penstock-tcp": steps(20.0), "zmq-tcp": steps(5.0)}
    monkeypatch.setattr(transport, "CONTESTANTS", {"penstock": steps(), "peer": steps(10.0), "gone": absent} | tcp)
    monkeypatch.setattr(transport, "copy_limit", lambda _nbytes, _seconds: 2000.0)
    monkeypatch.setattr(transport, "spin_limit", lambda _nbytes, _seconds: 1000.0)
    target = tmp_path / "results.json"
    command = ["transport", "--contestants", "penstock", "peer", "gone", *tcp, "--repeats", "3", "--json", str(target)]
    monkeypatch.setattr("sys.argv", command)
    monkeypatch.setattr(transport, "Console", partial(Console, width=80))

    transport.main()

    content, shown = json.loads(target.read_text()), capsys.readouterr().out
    ours = content["rows"][3]
    assert content["limit"] == 2000
    assert [row["contestant"] for row in content["rows"]] == ["penstock-tcp", "peer", "zmq-tcp", "penstock"]
    assert (ours["producers"], ours["group"], ours["tokens"]) == (4, 8, 1024)
    assert (ours["trajectories_per_s"], ours["trajectories_per_s_range"]) == (300, [100, 500])
    assert (ours["ratio_to_limit"], ours["limit"], ours["spin_limit"]) == (0.15, 2000, 1000)
    assert (ours["p50_us"], ours["p99_us"]) == (1.0, 2.0)
    assert content["skipped"] == {"gone": "skipped: pip install gone"}
    assert "penstock / peer: 0.10" in shown
    assert "penstock-tcp / zmq-tcp: 4.00" in shown
    assert "gone skipped: pip install gone" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown


def test_a_run_in_which_penstock_failed_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(transport, "CONTESTANTS", {"penstock": losing, "peer": steps()})
    monkeypatch.setattr(transport, "copy_limit", lambda _nbytes, _seconds: 2000.0)
    monkeypatch.setattr(transport, "spin_limit", lambda _nbytes, _seconds: 1000.0)
    target = tmp_path / "results.json"
    monkeypatch.setattr(
        "sys.argv", ["transport", "--contestants", "penstock", "peer", "--repeats", "3", "--json", str(target)]
    )

    with pytest.raises(SystemExit, match="1"):
        transport.main()

    content = json.loads(target.read_text())
    assert [row["contestant"] for row in content["rows"]] == ["peer"]
    assert content["skipped"] == {"penstock": "failed: WrongContents: a reward differs"}


def steps(factor: float = 1.0) -> partial[Outcome]:
    """Return a contestant that is measured four times: latencies of 1 µs, then rates of 100, 300 and 500."""
    return partial(_next_outcome, iter([1.0, 1.0, 3.0, 5.0]), factor)


def _next_outcome(values: Iterator[float], factor: float, _case: Case) -> Outcome:
    value = next(values)
    return Outcome(100 * value * factor, value, 2 * value)


def losing(_case: Case) -> Outcome:
    raise WrongContents("a reward differs")


def absent(_case: Case) -> Outcome:
    raise Absent("pip install gone")
