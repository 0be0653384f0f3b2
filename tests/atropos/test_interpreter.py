"""An environment of Atropos in an interpreter of its own, which has other packages than that of the trainer."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from pathlib import Path

import pytest
from tests.atropos.step_environments import STAND_IN, Doubling
from tests.installation import interpreter

from penstock.errors import InvalidConfig, MissingExtra, PenstockError
from penstock.integrations.atropos import AtroposEnvironment

REPORTS = """
import os, sys
from tests.atropos.step_environments import Doubling

class Reports(Doubling):
    async def get_next_item(self):
        return {"number": f"{sys.prefix} {os.getpid()} {os.environ.get('PYTHONPATH')} "}
"""
"""Asks for its interpreter, its process, and the module path that the trainer was started with."""


@pytest.fixture
def python(tmp_path: Path) -> str:
    """Return an interpreter that has penstock and the stand-in for atroposlib; that of the tests has no atroposlib."""
    return interpreter(tmp_path / "of-atropos", str(STAND_IN), *filter(None, sys.path))


@pytest.fixture
def environment(python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AtroposEnvironment:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "of-the-trainer"))
    (tmp_path / "reports.py").write_text(REPORTS)
    made = AtroposEnvironment(f"{tmp_path}/reports.py:Reports", python=python)
    copied: AtroposEnvironment = pickle.loads(pickle.dumps(made))  # noqa: S301 (our own bytes)
    return copied


def test_it_runs_with_the_packages_of_its_interpreter_alone(environment: AtroposEnvironment, tmp_path: Path) -> None:
    env = environment.blocking()
    observation, _ = env.reset(seed=0)
    env.close()

    prefix, _, path, _ = observation.partition("<user>")[2].split(maxsplit=3)
    assert (prefix, path) == (str(tmp_path / "of-atropos"), "None")


@pytest.mark.long
def test_a_process_that_is_killed_is_followed_by_one_of_the_same_interpreter(environment: AtroposEnvironment) -> None:
    env = environment.blocking()
    first, _ = env.reset(seed=0)

    os.kill(int(first.split()[1]), signal.SIGKILL)

    with pytest.raises(PenstockError, match="was killed by SIGKILL"):
        env.step("0")
    second, _ = env.reset(seed=0)
    env.close()
    assert second.split()[0] == first.split()[0]
    assert second.split()[1] != first.split()[1]


def test_what_is_no_interpreter_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="python: expected a Python interpreter, got 'no/python': No such file"):
        AtroposEnvironment("environment.py:Env", python="no/python")()
    with pytest.raises(InvalidConfig, match=r"that imports penstock, got '/bin/false': exit status 1"):
        AtroposEnvironment("environment.py:Env", python="/bin/false")()


def test_an_interpreter_without_penstock_is_refused_with_the_command_that_installs_it(tmp_path: Path) -> None:
    python = interpreter(tmp_path / "bare")

    with pytest.raises(
        MissingExtra, match=rf"expected {python} to have penstock .*, got none: {python} -m pip install"
    ):
        AtroposEnvironment("environment.py:Env", python=python)()


def test_an_object_is_refused_because_the_other_interpreter_imports_the_environment_itself(python: str) -> None:
    with pytest.raises(InvalidConfig, match=r"expected package.module:Class or folder/file.py:Class with python="):
        AtroposEnvironment(Doubling, python=python)
