"""Workers in an interpreter with packages of its own, which those of this one may exclude."""

from __future__ import annotations

import os
import pickle
import select
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.failsafe import FAILSAFE_S
from tests.installation import interpreter
from tests.pipeline.flow_stages import Pack, Train
from tests.processes.worker_sinks import Commit
from tests.processes.worker_stages import Sample, SampleWith

from penstock import Source, TrajectoryGroup, processes, source
from penstock.errors import InvalidConfig, InvalidPipeline

ONE = Sample(1)


@pytest.fixture
def python(tmp_path: Path) -> str:
    """Return an interpreter that has penstock, and a module that this one lacks."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages/only_there.py").write_text("SAID = 'hello'")
    return interpreter(tmp_path / "other", str(tmp_path / "packages"), *filter(None, sys.path))


async def test_workers_run_with_the_packages_of_their_interpreter(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sink = Commit()

    await source(SampleWith("only_there"), on=processes(1, python=python)).sink(sink).run()

    assert sink.received == [f"{tmp_path / 'other'} hello None"]


def refusal(python: str, stage: Source[TrajectoryGroup] = ONE) -> str:
    """Return the error of a check of workers of an interpreter."""
    placed = source(stage, on=processes(1, python=python))
    with pytest.raises(InvalidPipeline) as refused:
        placed.then(Pack()).sink(Train()).check()
    return str(refused.value)


def test_what_is_no_interpreter_is_refused_before_the_run() -> None:
    assert refusal("no/python").endswith(
        "python: expected a Python interpreter, got 'no/python': No such file or directory"
    )


def script(path: Path, *lines: str) -> str:
    """Return the path of a program of the shell in place of an interpreter."""
    path.write_text("\n".join(["#!/bin/sh", *lines]))
    path.chmod(0o755)
    return str(path)


def has_ended(pid: int) -> bool:
    """Return whether a process ends."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ready, _, _ = select.select([descriptor], [], [], FAILSAFE_S)
    os.close(descriptor)
    return bool(ready)


WRONG = {
    "a program that succeeds": ("exit 0", ": exit status 0"),
    "one that prints another thing": ("echo 0.1.0", ": 0.1.0"),
    "one that fails": ("echo no such option -P >&2; exit 2", ": no such option -P"),
    "one that prints without end before it fails": ("head -c 5000000 /dev/zero; echo; echo broken; exit 1", ": broken"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_another_program_is_refused_with_the_last_that_it_printed(wrong: str, tmp_path: Path) -> None:
    line, expected = WRONG[wrong]

    refused = refusal(script(tmp_path / "python", line))

    assert "expected a Python interpreter of version 3.11 or later that imports penstock, got " in refused
    assert refused.endswith(expected)


def test_an_interpreter_in_which_penstock_cannot_be_imported_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "broken/penstock").mkdir(parents=True)
    (tmp_path / "broken/penstock/__init__.py").write_text("import a_package_that_is_absent")
    found = [each for each in sys.path if (Path(each) / f"penstock-{version('penstock')}.dist-info").exists()]

    refused = refusal(interpreter(tmp_path / "other", str(tmp_path / "broken"), *found))

    assert refused.endswith(": ModuleNotFoundError: No module named 'a_package_that_is_absent'")


def test_a_program_that_does_not_end_is_refused_and_its_processes_end_with_it(tmp_path: Path) -> None:
    """The limit is that of the start of a worker; what the program prints goes on beside it."""
    endless = script(tmp_path / "python", f"sleep 600 & echo $! > {tmp_path}/pid", "yes")
    placed = source(ONE, on=processes(1, python=endless, start_timeout_s=1.0)).then(Pack()).sink(Train())

    with pytest.raises(InvalidPipeline, match="to answer within 1 s, got no answer"):
        placed.check()

    assert has_ended(int((tmp_path / "pid").read_text()))


def test_what_a_probe_leaves_behind_does_not_delay_the_run(python: str, tmp_path: Path) -> None:
    """A process that holds its output does not keep the check from ending, and ends with it."""
    leaving = script(tmp_path / "leaving", f"sleep 600 & echo $! > {tmp_path}/pid", f'{python} "$@"')

    source(ONE, on=processes(1, python=leaving)).then(Pack()).sink(Train()).check()

    assert has_ended(int((tmp_path / "pid").read_text()))


def test_an_interpreter_without_this_penstock_is_refused_with_the_command_that_installs_it(tmp_path: Path) -> None:
    bare = interpreter(tmp_path / "bare", str(tmp_path / "old"))
    assert f"python: expected {bare} to have penstock " in (none := refusal(bare))
    assert f", got none: {bare} -m pip install " in none

    (tmp_path / "old/penstock-0.0.1.dist-info").mkdir(parents=True)
    (tmp_path / "old/penstock-0.0.1.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: penstock\nVersion: 0.0.1"
    )
    assert f", got 0.0.1: {bare} -m pip install " in refusal(bare)


class OfTheScript(Sample):
    """A stage that a script defines."""


def test_a_stage_of_the_script_is_refused_because_another_interpreter_imports_none(
    python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "OfTheScript", OfTheScript, raising=False)
    monkeypatch.setattr(OfTheScript, "__module__", "__main__")
    assert b"__main__" in pickle.dumps(OfTheScript(1))

    assert "python: expected functions and classes of modules, got some of the script" in refusal(
        python, OfTheScript(1)
    )


def test_a_placement_tells_the_interpreter(tmp_path: Path) -> None:
    assert (
        str(processes(2, python=f"{tmp_path}/python"))
        == f"2 processes of {tmp_path}/python, at most 1 restart an hour each"
    )
    for wrong in (3, ""):
        with pytest.raises(InvalidConfig, match=f"python: expected the path of an interpreter, got {wrong!r}"):
            processes(1, python=wrong)  # type: ignore[arg-type]
