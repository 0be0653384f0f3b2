"""The benchmark of Atropos, with real processes and a small case."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from benchmarks import atropos
from benchmarks.atropos import WAYS, Case, Outcome, Window
from benchmarks.atropos_clients import GROUP, Load
from benchmarks.contestants import Absent
from benchmarks.contestants.harness import Control
from rich.console import Console
from tests.faults.zygote import ROOT, environment


@pytest.mark.long
def test_groups_arrive_and_are_counted(tmp_path: Path) -> None:
    target = tmp_path / "results.json"
    small = ["--tokens", "256", "--clients", "1", "--seconds", "0.1", "--json", str(target)]
    command = [sys.executable, "-m", "benchmarks.atropos", "--ways", "gateway", "shm", *small]
    ran = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stderr
    rows = json.loads(target.read_text())["rows"]
    assert [row["way"] for row in rows] == ["gateway", "shm"]
    assert all(row[name][0] > 0 for row in rows for name in ("trajectories_per_s", "server_us", "clients_us"))


def test_arrivals_within_the_window_are_counted_from_first_to_last() -> None:
    control, arrivals, cpu = Control(1), iter([0.0, 0.1, 1.0, 2.0, 4.0]), iter([(1.0, 2.0), (4.0, 8.0)])
    window = Window(2.0, control, cpu.__next__, arrivals.__next__)

    assert [window.arrived(10) for _ in range(6)] == [False, False, False, False, True, True]
    assert window.outcome == Outcome(20 / 3, 3 / 20 * 1e6, 6 / 20 * 1e6)
    assert control.stopping


def test_without_atropos_the_error_names_the_command_for_a_comparison(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ATROPOS_PYTHON", str(tmp_path / "python"))

    with pytest.raises(Absent, match="ATROPOS_PYTHON"):
        WAYS["original"](Case(Load(64), clients=1, seconds=0.1))


def test_results_hold_ratios_to_the_original_of_the_same_turn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = {
        "original": iter([Outcome(100, 5000, 9000), Outcome(200, 4000, 9000)]),
        "shm": iter([Outcome(20_000, 50, 60), Outcome(20_000, 40, 60)]),
    }
    monkeypatch.setattr(atropos, "WAYS", {way: partial(_next, way, turns) for way in turns} | {"gateway": _absent})
    target = tmp_path / "results.json"
    command = ["atropos", "--tokens", "256", "--repeats", "2", "--json", str(target)]
    monkeypatch.setattr("sys.argv", [*command, "--ways", "original", "shm", "gateway"])
    monkeypatch.setattr(atropos, "Console", partial(Console, width=80))

    atropos.main()

    content, shown = json.loads(target.read_text()), capsys.readouterr().out
    shm = content["rows"][1]
    assert (shm["way"], shm["tokens"], shm["ratio"], shm["server_share"]) == ("shm", 256, [200, 100], [0.01, 0.01])
    assert content["skipped"] == {"gateway": "skipped: pip install it"}
    assert f"groups of {GROUP} × 256 tokens" in shown
    assert "gateway skipped: pip install it" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown


def _next(way: str, turns: dict[str, Any], _: Case) -> Outcome:
    outcome: Outcome = next(turns[way])
    return outcome


def _absent(_: Case) -> Outcome:
    raise Absent("pip install it")
