"""Commands that read the folder of a run, whose files may be anything: each ends by itself, in one line of an error."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.command_line import ran
from tests.commands.written_run import write_lines

FILES_READ = {
    "report": ("metrics.jsonl", "config.json", "view.json", "summary.json", "samples.jsonl", "lock"),
    "plot": ("metrics.jsonl",),
    "diagnose": ("metrics.jsonl", "config.json", "view.json", "summary.json", "samples.jsonl"),
    "samples": ("samples.jsonl",),
    "top": ("view.json", "lock"),
}

CONTENTS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "endless device": lambda file: file.symlink_to("/dev/zero"),
    "link to itself": lambda file: file.symlink_to(file.name),
    "folder": lambda file: file.mkdir(),
    "other bytes": lambda file: file.write_bytes(bytes(range(256)) * 8 + b"\n"),
    "other type": lambda file: file.write_text('[1, 2, {"a": null}]\n'),
    "other members": lambda file: file.write_text('{"step": "x", "shown": [], "ledger": 1, "algorithm": 3}\n'),
    "numbers beyond 64 bits": lambda file: file.write_text('{"step": 1e400, "written_s": 1' + "0" * 5_000 + "}\n"),
    "deep lists": lambda file: file.write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}\n"),
    "long name": lambda file: file.write_text('{"step": 1, "' + "x" * 1_000_000 + '": 1}\n'),
    "many names": lambda file: file.write_text('{"step": 1' + "".join(f', "{n}": 1' for n in range(50_000)) + "}\n"),
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize(
    ("command", "file"), [(command, file) for command, files in FILES_READ.items() for file in files]
)
def test_a_command_ends_in_one_line_whatever_a_file_is(command: str, file: str, content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 1.0}])
    (tmp_path / file).unlink(missing_ok=True)
    CONTENTS[content](tmp_path / file)

    status, printed = ran(command, tmp_path)

    assert status in {0, 1}
    assert printed.count("penstock: ") <= 1
    assert all(letter.isprintable() or letter == "\n" for letter in printed)


def test_a_view_or_a_line_of_any_size_is_read_up_to_a_bound(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 1.0}])
    for name in ("view.json", "samples.jsonl"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(2**27)
            file.seek(0, os.SEEK_END)
            file.write(b"\n")

    assert (
        "view.json: expected to read back what was written, got more than 67,108,864 bytes" in ran("top", tmp_path)[1]
    )
    assert "expected a sample in line 1, got more than 8,388,608 bytes" in ran("samples", tmp_path)[1]


@pytest.mark.parametrize("command", ["report", "plot"])
def test_values_and_steps_without_a_place_on_an_axis_are_not_drawn(command: str, tmp_path: Path) -> None:
    huge = {"loss": 1.7e308, "perf/total_num_tokens": 1.7e308, "eval/step": 1e300, "eval/data/reward": 1.0}
    least = {"loss": -1.7e308, "eval/step": -1e300, "eval/data/reward": 1.0}
    write_lines(tmp_path / "metrics.jsonl", [{"step": 2**53, **huge}, {"step": 7, **least}, {"step": 0, **huge}])

    status, printed = ran(command, tmp_path)

    assert status == 0, printed
