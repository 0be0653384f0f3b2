"""Runs that were broken on purpose, one for each rule of `penstock diagnose`, and one that was not."""

from __future__ import annotations

import pytest
from tests import command_line
from tests.models_hf.broken_runs import MISTAKES, Folder, Mistake, write_folder

from penstock.runs import load_run_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return write_folder(tmp_path_factory.mktemp("broken"))


@pytest.mark.parametrize(
    "rule",
    [pytest.param(rule, marks=[] if rule == "learning_rate_zero" else pytest.mark.long) for rule in MISTAKES],
)
def test_a_run_with_a_mistake_has_a_finding_of_its_rule_with_values_that_can_be_given(
    rule: str, folder: Folder
) -> None:
    run, printed = folder.run(rule, MISTAKES[rule])

    status, diagnosis = command_line.ran("diagnose", run)

    assert status == 1
    found = [line.partition(":")[0] for line in diagnosis.splitlines() if line and not line.startswith(" ")][:-1]
    assert rule in found, diagnosis
    # Without a step there is no view of findings: the run warns by itself, and ends.
    assert ("what the stages filter" if rule == "nothing_trained" else "penstock: finding: ") in printed
    lines = [line.strip() for line in diagnosis.splitlines()]
    values = [line.removeprefix("try:").strip() for line in lines if "=" in line and " " not in line[4:].strip()]
    assert values
    for value in values:
        load_run_config(folder.values(MISTAKES[rule]), [value])


@pytest.mark.long
def test_a_run_without_a_mistake_has_no_finding(folder: Folder) -> None:
    run, printed = folder.run("healthy", Mistake([]))

    assert command_line.ran("diagnose", run)[0] == 0
    assert "finding" not in printed
