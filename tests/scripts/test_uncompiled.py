"""A stand-in for a compiled dependency raises when it is used, and not before."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent.parent / "scripts/uncompiled/pycosat"


def test_a_stand_in_can_be_imported_and_names_the_real_package_when_called() -> None:
    spec = importlib.util.spec_from_file_location("stand_in", FOLDER / "pycosat.py")
    assert spec
    assert spec.loader
    stand_in = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stand_in)

    with pytest.raises(RuntimeError, match="apt-get install gcc python3-dev"):
        stand_in.itersolve([[1, -2]])


def test_it_meets_the_pin_of_the_real_one_under_a_version_of_its_own() -> None:
    version = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]["version"]
    pins = (FOLDER.parents[2] / "constraints.txt").read_text().splitlines()

    assert f"pycosat=={version.partition('+')[0]}" in pins
    assert "+" in version
