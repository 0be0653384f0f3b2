"""`penstock report`: what the file of a page contains, for runs of any size and files of any content."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.command_line import ran
from tests.commands.attacks import ATTACKS, RUN
from tests.commands.written_run import many_samples, rollout, sample, write_attacked_run, write_lines, write_run

SCRIPT = re.compile(r"<script[^>]*>(.*?)</script>", re.DOTALL)


def report(*arguments: object, status: int = 0) -> str:
    ended, printed = ran("report", *arguments)
    assert ended == status, printed
    return printed


def page_of(*folders: Path) -> str:
    report(*folders)
    return (folders[0] / "report.html").read_text()


def data_of(page: str) -> dict[str, Any]:
    """Return the data of a page, as its script decodes them."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_a_page_has_the_curves_of_each_run_under_names_that_tell_them_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name / "run", steps=steps) for name, steps in (("one", 20), ("two", 30))]

    printed = report(*runs)

    data = data_of((runs[0] / "report.html").read_text())
    assert printed == f"wrote {runs[0] / 'report.html'}\n"
    assert [run["name"] for run in data["runs"]] == ["one/run", "two/run"]
    assert [run["curves"]["last_step"] for run in data["runs"]] == [20, 30]
    reward = data["runs"][0]["curves"]["drawn"]["reward"]
    axis = data["runs"][0]["curves"]["axes"][reward["axis"]]
    assert axis["step"] == list(range(1, 21))
    assert axis["tokens"] == [32_768 * step for step in range(1, 21)]
    assert axis["hours"][-1] == pytest.approx(20 / 3600, rel=1e-5)
    assert data["units"]["timing_s/Batcher/wait_input"]["unit"] == "s"


def test_a_page_has_what_diagnose_finds_in_each_run(tmp_path: Path) -> None:
    learns, frozen = write_run(tmp_path / "learns"), tmp_path / "frozen"
    frozen.mkdir()
    write_lines(frozen / "metrics.jsonl", [{"step": step, "lr": 0.0, "reward": 0.5} for step in range(1, 21)])

    (first, second) = data_of(page_of(learns, frozen))["runs"]

    assert first["findings"] == []
    assert "learning_rate_zero" in second["looked_at"]
    (found,) = [each for each in second["findings"] if each["rule"] == "learning_rate_zero"]
    assert found["numbers"]
    assert found["causes"]
    assert found["change"]
    assert found["means"]


def test_a_page_is_written_where_it_is_wanted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")

    report(run, "--output", tmp_path / "page.html")

    assert (tmp_path / "page.html").is_file()
    assert not (run / "report.html").exists()


def test_a_page_loads_nothing_and_runs_its_own_scripts_alone(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run"))

    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    assert policy[1].startswith("default-src &#39;none&#39;; script-src &#39;sha256-")
    assert "unsafe-eval" not in policy[1]
    assert "script-src &#39;unsafe-inline" not in policy[1]
    assert "connect-src &#39;none&#39;" in policy[1]
    assert not re.search(r"<(?:script|link|img|iframe)[^>]*\s(?:src|href)=", SCRIPT.sub("", page))


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a page of a run all of whose texts are attacks."""
    return page_of(write_attacked_run(tmp_path_factory.mktemp("attacked"), ATTACKS))


@pytest.mark.parametrize("name", ATTACKS)
def test_text_of_a_model_arrives_as_it_is(attacked: str, name: str) -> None:
    text, (run,) = ATTACKS[name], data_of(attacked)["runs"]

    shown = text if len(text) <= 50_000 else text[:49_999] + "…"
    assert run["damage"] == []
    assert [each["kind"] for each in run["samples"]["shown"] if each["prompt"] == shown] == ["best", "worst"]
    assert text[:100] in run["curves"]["drawn"]
    assert f"key.{text[:100]}" in run["settings"][0]["values"]
    assert text[:100] in run["state"]["balance"]["reasons"]["failed"]


def test_text_of_a_model_is_in_no_markup_and_no_script(attacked: str) -> None:
    data, *scripts = SCRIPT.findall(attacked)

    assert len(scripts) == 3
    assert RUN not in SCRIPT.sub("", attacked)
    assert not set("<>&\u2028\u2029\0") & set(data)
    assert not [script for script in scripts if RUN in script]


def test_lone_surrogates_are_a_damaged_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", samples=[sample()])
    with (run / "samples.jsonl").open("a") as file:
        file.write(json.dumps(sample(prompt="\ud800")) + "\n")

    (found,) = data_of(page_of(run))["runs"]

    assert len(found["samples"]["shown"]) == 1
    assert len(found["damage"]) == 1
    assert found["damage"][0].startswith("samples.jsonl: 1 damaged lines are left out, the first is line 2: ")


def test_damaged_lines_are_left_out_and_counted_and_one_that_is_being_written_is_awaited(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=3)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": "four"}\n[1]\n{"step": -1}\n\xff\n' + b"[" * 5_000 + b"\n" + b"x" * 2**23 + b"\n")
        file.write(b'{"step": 4, "reward": 0.5}\n{"step": 5, "rew')

    (found,) = data_of(page_of(run))["runs"]

    assert found["curves"]["last_step"] == 4
    assert found["damage"][0].startswith("metrics.jsonl: 6 damaged lines are left out, the first is line 4: ")


def test_an_evaluation_stands_at_the_step_whose_weights_were_evaluated(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=3)
    write_lines(run / "metrics.jsonl", [{"step": 4, "eval/step": 2, "eval/data/reward": 0.5, "reward": 0.25}])

    curves = data_of(page_of(run))["runs"][0]["curves"]

    assert curves["axes"][curves["drawn"]["eval/data/reward"]["axis"]]["step"] == [2]
    assert curves["axes"][curves["drawn"]["reward"]["axis"]]["step"] == [1, 2, 3, 4]


def test_values_that_are_not_finite_are_in_no_curve_and_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2)
    write_lines(run / "metrics.jsonl", [{"step": 3, "loss": None}, {"step": 4, "loss": 1.0}])

    loss = data_of(page_of(run))["runs"][0]["curves"]["drawn"]["loss"]

    assert (len(loss["mean"]), loss["not_finite"]) == (3, 1)


def test_a_long_run_is_bounded_by_rules_that_the_page_states(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=4_500, samples=many_samples(12_000, steps=4_500))

    page = page_of(run)

    data = data_of(page)
    (found,) = data["runs"]
    assert {len(curve["mean"]) for name, curve in found["curves"]["drawn"].items() if "eval/" not in name} == {1_125}
    reward = found["curves"]["drawn"]["reward"]
    assert all(
        low <= mean <= high for low, mean, high in zip(reward["low"], reward["mean"], reward["high"], strict=True)
    )
    steps = sorted({each["step"] for each in found["samples"]["shown"]})
    assert len(found["samples"]["shown"]) <= 2_000
    assert (steps[0], steps[-1]) == (3, 4_500)
    assert len(data["rules"]) == 2
    assert "means of 2, 4, 8" in data["rules"][0]
    assert f"{found['samples']['found']:,} samples" in data["rules"][1]


def test_metrics_without_end_are_bounded(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1)
    write_lines(run / "metrics.jsonl", [{"step": 2, **{f"mine/{number}": 1.0 for number in range(1_500)}}])

    data = data_of(page_of(run))

    assert len(data["runs"][0]["curves"]["drawn"]) == 1_000
    assert any("metrics are not drawn" in rule for rule in data["rules"])


def test_a_sample_has_its_tokens_one_by_one_and_the_other_sequences_of_its_rollout(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", samples=[rollout()])

    (shown,) = data_of(page_of(run))["runs"][0]["samples"]["shown"]

    assert shown["tokens"]["trains"] == [[3, True], [3, False], [4, True]]
    assert shown["tokens"]["log_ratios"][1] == 0.3
    assert shown["branches"][0]["completion"] == "I do not know."


def test_the_parts_of_a_run_that_was_continued_otherwise_stand_beside_each_other(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", config={"lr": 1e-3, "model": {"path": "m"}, "sets": [{"a": 1}], "penstock": {}})
    (run / "config.step-00000010.json").write_text(json.dumps({"lr": 1e-4, "model": {"path": "m"}}))
    (run / "config.step-00000015.json").write_text("{")

    parts = data_of(page_of(run))["runs"][0]["settings"]

    assert [part["begins"] for part in parts] == [0, 10, 15]
    assert parts[0]["values"] == {"lr": "0.001", "model.path": '"m"', "sets[0].a": "1"}
    assert parts[1]["values"]["lr"] == "0.0001"
    assert "config.step-00000015.json: expected to read back what was written" in parts[2]["fault"]


@pytest.mark.parametrize("name", ["view.json", "config.json"])
def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run")
    with (run / name).open("wb") as file:
        file.truncate(2**34)

    (found,) = data_of(page_of(run))["runs"]

    assert "67,108,864 bytes" in f"{found['state']['sentence']} {found['settings'][0]['fault']}"


def test_an_absent_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)

    printed = report(write_run(tmp_path / "run"), status=1)

    assert printed.startswith("penstock: penstock report needs jinja2, which is not installed: pip install ")
    assert "[report]" in printed


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    printed = report(tmp_path, status=1)

    assert printed.startswith(f"penstock: expected the folder of a run, with metrics.jsonl, got {tmp_path}: ")


def test_a_run_that_has_not_trained_yet_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    (found,) = data_of(page_of(tmp_path))["runs"]

    assert found["curves"]["drawn"] == {}
