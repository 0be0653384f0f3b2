"""Targets, scripts and extras that the forge runs exist; actions are pinned to a commit; its forms are complete."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def steps() -> list[dict[str, Any]]:
    return [step for path in WORKFLOWS for job in load(path)["jobs"].values() for step in job["steps"]]


def commands() -> list[str]:
    return [step["run"] for step in steps() if "run" in step]


def test_every_make_target_of_a_workflow_exists() -> None:
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wanted = {target for command in commands() for target in re.findall(r"\bmake ([\w-]+)", command)}

    assert wanted
    assert wanted <= targets


def test_the_weekly_jobs_are_the_targets_of_test_plugins_with_the_same_commits() -> None:
    makefile = (ROOT / "Makefile").read_text()
    matrix = load(ROOT / ".github/workflows/weekly.yml")["jobs"]["plugins"]["strategy"]["matrix"]
    others = matrix["include"]
    targets = re.search(r"^PLUGINS := (.*)$", makefile, re.MULTILINE)
    checkouts = {
        (name, job[name]) for job in others for name in ("prime-rl", "slime", "roll", "atropos") if name in job
    }

    assert targets is not None
    assert sorted([*matrix["target"], *(job["target"] for job in others)]) == sorted(targets[1].split())
    for name, commit in checkouts:
        assert f"COMMIT_OF_{name.upper().replace('-', '_')} := {commit}\n" in makefile
    assert len(checkouts) == len(re.findall(r"^COMMIT_OF_", makefile, re.MULTILINE))


def test_every_script_of_workflows_and_hooks_exists_and_can_be_executed() -> None:
    hooks = [hook["entry"] for repo in load(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    scripts = {script for line in [*commands(), *hooks] for script in re.findall(r"\b(?:scripts|tests)/[\w./-]+", line)}

    assert {"scripts/smoke.sh", "scripts/check_subject.sh", "tests/test_imports.py"} <= scripts
    assert [script for script in scripts if not (ROOT / script).is_file()] == []
    assert [script for script in scripts if script.endswith(".sh") and not (ROOT / script).stat().st_mode & 0o100] == []


def test_every_extra_that_a_workflow_installs_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = {
        extra for line in commands() for found in re.findall(r"\.\[([\w,]+)\]", line) for extra in found.split(",")
    }

    assert wanted
    assert wanted <= set(extras)


def test_the_supported_versions_of_python_are_those_that_are_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))

    assert load(ROOT / ".github/workflows/checks.yml")["jobs"]["tests"]["strategy"]["matrix"]["python"] == declared
    assert project["requires-python"] == f">={declared[0]}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_only_read_and_is_bounded_in_time(path: Path) -> None:
    workflow = load(path)

    assert workflow["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())


def test_only_the_job_that_publishes_may_identify_itself_and_it_runs_nothing_of_the_checkout() -> None:
    jobs = {(path.stem, name): job for path in WORKFLOWS for name, job in load(path)["jobs"].items()}

    may = {name: job["permissions"] for name, job in jobs.items() if "permissions" in job}
    assert may == {("release", "publish"): {"id-token": "write"}, ("release", "docs"): {"contents": "write"}}
    assert [step["uses"].partition("@")[0] for step in jobs["release", "publish"]["steps"]] == [
        "actions/download-artifact",
        "pypa/gh-action-pypi-publish",
    ]


def test_every_action_is_pinned_to_a_commit() -> None:
    used = [step["uses"] for step in steps() if "uses" in step]

    assert used
    assert [action for action in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action)] == []


FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_has_a_name_a_description_and_a_required_field(path: Path) -> None:
    form = load(path)
    fields = [field for field in form["body"] if field["type"] != "markdown"]

    assert form["name"]
    assert form["description"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_bugs_features_and_documentation_have_a_form_and_pull_requests_a_template() -> None:
    assert {path.stem for path in FORMS} == {"bug", "feature", "documentation"}
    assert ".ci/run" in (ROOT / ".github/PULL_REQUEST_TEMPLATE.md").read_text()


def test_dependencies_and_actions_are_updated_from_folders_that_exist() -> None:
    updates = load(ROOT / ".github/dependabot.yml")["updates"]
    folders = [folder for update in updates for folder in update.get("directories", [update.get("directory")])]

    assert {update["package-ecosystem"] for update in updates} == {"pip", "github-actions"}
    assert [folder for folder in folders if not (ROOT / folder.strip("/")).is_dir()] == []
