"""`penstock diagnose`: each rule on the numbers of a run that was recorded so, and folders that came from anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests import command_line
from tests.commands.waiting_run import printed_behind
from tests.namespaces import read_only

PAGE = Path(__file__).parent.parent.parent / "docs" / "diagnose.md"

STEPS = 40

HEALTHY: Mapping[str, Any] = {
    "reward": [0.1 + 0.01 * step for step in range(STEPS)],
    "lr": 1e-5,
    "weights/changed": 0.98,
    "grad_norm": 0.5,
    "kl": 0.01,
    "ref_kl": 0.1,
    "ratio/effective_sample_size": 0.97,
    "ratio/max": 2.0,
    "entropy": 1.0,
    "batch/steps_without_signal": 0.0,
    "frac_reward_zero_std": 0.3,
    "response_length/clip_ratio": 0.1,
    "staleness/mean": 1.0,
    "batch/trajectories": 64.0,
    "trained/length/mean": 100.0,
    "sampled/length/mean": 100.0,
    "trained/reward/mean": 0.3,
    "sampled/reward/mean": 0.3,
    "sampled/reward/min": 0.0,
    "sampled/reward/max": 1.0,
    "eval/task/mean@1": [0.1 + 0.01 * step for step in range(STEPS)],
    "eval/step": [float(step) for step in range(STEPS)],
}
"""A run that learns: the courses of its metrics, or the value of all steps."""

FLAT = {"reward": [0.3 + 0.001 * (step % 2) for step in range(STEPS)]}
"""A reward that does not rise."""

BROKEN: Mapping[str, Mapping[str, Any]] = {
    "learning_rate_zero": {"lr": 0.0},
    "updates_lost_in_rounding": {"weights/changed": 0.01},
    "no_learning_signal": {**FLAT, "batch/steps_without_signal": [float(step) for step in range(STEPS)]},
    "too_old": {"staleness/mean": 12.0},
    "kl_exploding": {"kl": 0.7},
    "ratio_collapsed": {"ratio/effective_sample_size": 0.2},
    "entropy_gone": {**FLAT, "entropy": 0.001},
    "end_tokens_never_sampled": {**FLAT, "response_length/clip_ratio": 1.0},
    "lengths_at_bound": {**FLAT, "response_length/clip_ratio": 0.8},
    "prompts_too_hard": {"reward": [0.01 * (step % 2) for step in range(STEPS)], "frac_reward_zero_std": 0.95},
    "prompts_too_easy": {"reward": [0.98 + 0.01 * (step % 2) for step in range(STEPS)], "frac_reward_zero_std": 0.95},
    "most_dropped": {"dropped/filtered": 128.0},
    "evaluation_falls": {"eval/task/mean@1": [0.5 - 0.01 * step for step in range(STEPS)]},
    "trained_differ_from_sampled": {"sampled/length/mean": 160.0},
}
"""The metrics of a run that differ from those of a healthy one, by the rule that sees it."""

CONFIG = {
    "algorithm": {"optimizer": {"lr": 1e-5, "warmup_steps": 5}, "group_size": 8, "max_lag": 2, "kl": 0.0},
    "sampling": {"max_completion_tokens": 64},
}


def write_run(folder: Path, metrics: Mapping[str, Any], steps: int = STEPS) -> Path:
    """Write the folder of a run with these metrics; return it."""
    folder.mkdir(exist_ok=True)
    lines = [{"step": step + 1} | {name: at(course, step) for name, course in metrics.items()} for step in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def at(course: Any, step: int) -> float:
    value: float = course[step] if isinstance(course, list) else course
    return value


def diagnosed(folder: Path, status: int) -> str:
    ended, printed = command_line.ran("diagnose", folder)
    assert ended == status, printed
    return printed


def rows() -> dict[str, str]:
    """Return the rows of the page by the name of their rule."""
    return {name: row for row, name in re.findall(r"^(\| `(\w+)` \|.*\|)$", PAGE.read_text(), re.MULTILINE)}


def test_a_run_that_learns_has_no_finding_and_what_was_looked_at_is_named(tmp_path: Path) -> None:
    printed = diagnosed(write_run(tmp_path, HEALTHY), 0)

    count = len(rows())
    assert printed.startswith(f"no finding in {STEPS} steps, by {count} of {count} rules: {', '.join(rows())}\n")


@pytest.mark.parametrize("rule", BROKEN)
def test_each_rule_finds_its_mistake_and_no_other_and_the_page_has_the_same_words(rule: str, tmp_path: Path) -> None:
    printed = diagnosed(write_run(tmp_path, {**HEALTHY, **BROKEN[rule]}), 1)

    head, *lines = printed.splitlines()
    name, _, means = head.partition(": ")
    parts = {line[:8].strip(): line for line in lines}
    assert name == rule
    assert "1 finding in" in printed
    assert " step" in parts["seen:"] or "in each" in parts["seen:"]
    assert means in rows()[rule]
    for line in lines[1 : lines.index("")]:
        text = line.partition("causes:")[2] or line.partition("try:")[2] or line
        assert text.strip().partition("=")[0] in rows()[rule]


def test_the_rules_of_the_page_are_all_that_have_a_recorded_run() -> None:
    assert rows().keys() - BROKEN.keys() == {"nothing_trained"}


def test_a_run_without_a_step_whose_trajectories_were_all_dropped_has_trained_nothing(tmp_path: Path) -> None:
    ended = {"trained": 0, "filtered": 2000, "failed": 16}
    (tmp_path / "view.json").write_text(json.dumps({"shown": {"balance": {"ended": ended}}}))

    printed = diagnosed(tmp_path, 1)

    assert printed.startswith("nothing_trained: trajectories end, and none is trained\n")
    assert "2,000 filtered, 16 failed" in printed
    assert "algorithm.drop_zero_variance=false" in printed


def test_lines_that_are_damaged_are_left_out_and_counted_and_an_unfinished_one_is_being_written(
    tmp_path: Path,
) -> None:
    folder = write_run(tmp_path, HEALTHY)
    hostile = [b"[1]", b'{"reward": 1}', b'{"step": -1}', b'{"step": 1, "lr": "\x1b[2J"}', b"{" * 5000, b"x" * 2**21]
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"".join(line + b"\n" for line in hostile) + b'{"step": 41, "lr": 0.0')
    (folder / "samples.jsonl").write_bytes(b'{"reward": "\x1b[2J", "stop_reason": 3}\n')
    (folder / "config.json").write_text('{"algorithm": "grpo"}')

    printed = diagnosed(folder, 0)

    assert f"no finding in {STEPS} steps" in printed
    assert "metrics.jsonl: 6 lines that cannot be read" in printed
    assert "samples.jsonl: 1 lines that cannot be read" in printed
    assert "config.json: " in printed
    assert "\x1b" not in printed


def test_numbers_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path, {**HEALTHY, "entropy": [None] * STEPS, "reward": [None] * STEPS})

    assert "not looked at, for want of metrics: no_learning_signal, entropy_gone" in diagnosed(folder, 0)


def test_a_folder_that_cannot_be_written_is_diagnosed_and_one_without_a_run_is_an_error(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", HEALTHY)

    assert "no finding" in printed_behind(read_only(folder), "diagnose", folder)
    assert diagnosed(tmp_path, 1).startswith("penstock: expected the folder of a run, with metrics.jsonl, got ")
