"""The Python blocks of README and docs run: those of one page are one program, read from top to bottom.

The pages that users read first are run in an empty folder, with penstock from a wheel; one that starts processes as a
script of its own, as its reader would.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests import command_line, pages
from tests.pages import BLOCK, program, run_page

ROOT = Path(__file__).parent.parent
CODE = re.compile(r"^```.*?^```$|`[^`]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
README_LINES = 100

LONG_FROM_A_WHEEL = ("README.md", "docs/training.md")
"""They train, in processes that import torch: `make test` runs them, and scripts, on forks, with the checkout."""

FROM_A_WHEEL = ("docs/coming-from.md", "docs/rewards.md")
"""A process for each of the others would take minutes."""

ELSEWHERE = ("docs/bring-your-agent.md", "docs/trl.md", "docs/ray.md", "docs/several-hosts.md")
"""`make test-agents`, `make test-trl` and `make test-ray` run the first three, which need packages of others; the
script of the last one waits for a worker: tests/processes/test_joining.py runs both."""


def pages_with_code() -> list[str]:
    """Return README and every page under docs/ with Python, except decisions, whose code is not meant to run."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        page.relative_to(ROOT).as_posix()
        for page in found
        if "decisions" not in page.parts
        and BLOCK.search(page.read_text())
        and page.relative_to(ROOT).as_posix() not in ELSEWHERE
    ]


@pytest.mark.parametrize("name", pages_with_code())
def test_the_code_of_a_page_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)

    if name in LONG_FROM_A_WHEEL or (is_script(name) and name not in FROM_A_WHEEL):
        with request.getfixturevalue("forks_with_torch").in_place_of_interpreters():
            run_outside_the_checkout(command_of(name), ROOT / "src")
    elif name in FROM_A_WHEEL:
        run_outside_the_checkout(command_of(name), request.getfixturevalue("wheel"))
    else:
        run_page(ROOT / name)


@pytest.mark.long
@pytest.mark.parametrize("name", LONG_FROM_A_WHEEL)
def test_a_page_that_trains_runs_with_penstock_from_a_wheel(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wheel: Path
) -> None:
    monkeypatch.chdir(tmp_path)

    run_outside_the_checkout(command_of(name), wheel)


def is_script(name: str) -> bool:
    return "__main__" in program(ROOT / name)


def command_of(name: str) -> list[str]:
    """Return the arguments of the interpreter that run a page in the current folder, with the files that it needs."""
    page = ROOT / name
    if name == "README.md":
        assert command_line.ran("init", ".", "--tiny")[0] == 0
    if not is_script(name):
        return [pages.__file__, os.fspath(page)]
    script = Path(f"{page.stem.replace('-', '_')}_page.py")
    script.write_text(shortened(program(page)))
    return [os.fspath(script)]


def shortened(script: str) -> str:
    """Return a script of README with two small steps: it runs, and need not learn."""
    return script.replace("max_steps=25", "max_steps=2").replace("sequences=256", "sequences=16")


def run_outside_the_checkout(command: list[str], packages: Path) -> str:
    """Run Python in the current folder with penstock from `packages`; return what it printed."""
    environment = os.environ | {"PYTHONPATH": os.fspath(packages)}  # comes before the editable installation
    ran = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, env=environment)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_pages_that_users_read_first_run_with_penstock_from_a_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wheel: Path
) -> None:
    monkeypatch.chdir(tmp_path)

    printed = run_outside_the_checkout(["-c", "import penstock; print(penstock.__file__)"], wheel)

    assert set(FROM_A_WHEEL) < set(pages_with_code())
    assert printed.strip() == os.fspath(wheel / "penstock/__init__.py")


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_every_link_to_a_file_leads_somewhere() -> None:
    everything = [*ROOT.glob("*.md"), ROOT / "examples/README.md", *(ROOT / "docs").rglob("*.md")]
    links = [(page, link) for page in everything for link in LINK.findall(CODE.sub("", page.read_text()))]

    assert not [(page.name, link) for page, link in links if not (page.parent / link).exists()]
