"""Workers in an interpreter with packages of its own, which those of this one may exclude."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest
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
    with pytest.raises(InvalidConfig, match="python: expected the path of an interpreter, got 3"):
        processes(1, python=3)  # type: ignore[arg-type]
