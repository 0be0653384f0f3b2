"""The options that all benchmarks have."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import report
from benchmarks.chart import picture


def parsed(*arguments: str) -> None:
    parser = report.command_line("What it is for.", seconds=1.0, repeats=1)
    parser.add_argument("--png", type=picture)
    parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seconds", "0"], "expected more than 0, got 0"),
        (["--seconds", "-1"], "expected more than 0, got -1"),
        (["--seconds", "nan"], "expected more than 0, got nan"),
        (["--seconds", "inf"], "expected more than 0 and an end, got inf"),
        (["--repeats", "0"], "expected at least 1, got 0"),
        (["--json", "{folder}"], "expected a file in a folder that can be written to"),
        (["--json", "{folder}/absent/results.json"], "expected a file in a folder that can be written to"),
        (["--png", "{folder}/absent/chart.png"], "expected a file in a folder that can be written to"),
        (["--png", "{folder}/chart.bmp"], "expected a name that ends in one of"),
    ],
    ids=" ".join,
)
def test_impossible_measurements_are_refused_before_anything_is_measured(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsed(*(argument.format(folder=tmp_path) for argument in arguments))

    assert message in capsys.readouterr().err


def test_files_that_are_there_or_can_be_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").touch()

    parsed("--json", "old.json", "--png", "chart.png", "--seconds", "0.2", "--repeats", "1")
