"""The public names: what `import penstock` costs, and that every name is where it says it is."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
import penstock.errors
import penstock.testing
from penstock.errors import MissingExtra

TENSORS = re.compile("torch|losses")
"""Modules that are nothing without torch."""


def python(*arguments: str) -> str:
    ran = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout + ran.stderr


def test_importing_penstock_imports_no_other_package() -> None:
    """That takes a few milliseconds; a name is imported with all that it needs when it is first asked for."""
    loads = "import sys; before = set(sys.modules); import penstock; print(*set(sys.modules) - before)"
    packages = {name.partition(".")[0] for name in python("-c", loads).split()}

    assert packages - sys.stdlib_module_names - {"penstock"} == set()


def test_no_name_that_works_without_tensors_imports_torch() -> None:
    tensors = {name for module, names in penstock._HOMES.items() for name in names if TENSORS.search(module)}
    plain = sorted(set(penstock.__all__) - tensors)

    loaded = python("-c", f"import sys\nfrom penstock import {', '.join(plain)}\nprint('torch' in sys.modules)")

    assert loaded.strip() == "False"


@pytest.mark.parametrize("module", [penstock, penstock.errors, penstock.testing])
def test_public_names_are_sorted_and_real(module: object) -> None:
    names = module.__all__  # type: ignore[attr-defined]

    assert names == sorted(names)
    assert [name for name in names if getattr(module, name) is None] == []


def test_type_checkers_are_told_the_same_as_the_interpreter() -> None:
    tree = ast.parse(Path(penstock.__file__).read_text())
    for_checkers = {
        (node.module, alias.name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    at_run_time = {(module, name) for module, names in penstock._HOMES.items() for name in names}

    assert at_run_time <= for_checkers
    assert {name for _, name in at_run_time} == set(penstock.__all__)


@pytest.mark.parametrize(
    ("module", "sources"), [("errors", ["errors"]), ("testing", ["channels.conformance", "testing"])]
)
def test_what_is_public_in_the_pipeline_folder_is_public_at_the_top(module: str, sources: list[str]) -> None:
    inner = [name for source in sources for name in importlib.import_module(f"penstock.pipeline.{source}").__all__]

    assert sorted(inner) == importlib.import_module(f"penstock.{module}").__all__


def test_an_unknown_name_is_an_attribute_error() -> None:
    misspelled = "Trajectori"

    with pytest.raises(AttributeError, match="no attribute 'Trajectori'"):
        getattr(penstock, misspelled)


def test_a_name_whose_dependency_is_missing_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: str, __: str) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(penstock, "import_module", absent)
    monkeypatch.delitem(vars(penstock), "Ledger", raising=False)

    with pytest.raises(MissingExtra, match=r"pip install 'penstock\[torch\]'"):
        penstock.Ledger  # noqa: B018 (asking is the test)
