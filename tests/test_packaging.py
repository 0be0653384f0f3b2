"""The built packages contain every folder and file that a user or a packager needs, each once."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tests.installation import ROOT, Installed

from penstock import __version__

ASSETS = ROOT / "pipeline/report/assets"

FOLDERS = ("pipeline", "schemas", "stages")


def _setuptools() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    return table


def test_the_packages_listed_are_the_folders_on_disk() -> None:
    folders = {path.parent for name in FOLDERS for path in (ROOT / name).rglob("*.py")}
    on_disk = {f"penstock._{folder.relative_to(ROOT).as_posix().replace('/', '.')}" for folder in folders}

    assert set(_setuptools()["packages"]) == on_disk | {"penstock", "penstock._cli", "penstock.integrations"}


def test_every_package_has_an_init_file() -> None:
    folders = {path.parent for name in FOLDERS for path in (ROOT / name).rglob("*.py")}

    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]


@pytest.mark.parametrize("name", FOLDERS)
def test_the_link_and_the_mapping_lead_to_the_same_folder(name: str) -> None:
    mapped = _setuptools()["package-dir"][f"penstock._{name}"]

    assert (ROOT / "src/penstock" / f"_{name}").resolve() == (ROOT / mapped).resolve() == ROOT / name


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    names = {_normal(line) for line in wanted} - {"penstock"}
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]

    assert names <= {_normal(line) for line in pins}
    assert not [line for line in pins if "==" not in line or "+" in line]


def _normal(requirement: str) -> str:
    """Return the name in a requirement, as the package index spells it."""
    name = re.match(r"[\w.-]+", requirement)
    assert name
    return name[0].lower().replace("_", "-")


def test_the_wheel_holds_every_module_under_the_import_name(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())

    assert {f"penstock/_{module}" for name in FOLDERS for module in _in(ROOT / name)} <= names
    assert {"penstock/__init__.py", "penstock/py.typed"} <= names
    assert {f"penstock/_pipeline/report/assets/{path.name}" for path in ASSETS.iterdir()} <= names
    assert {name.split("/")[0] for name in names} == {"penstock", f"penstock-{__version__}.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def _in(folder: Path) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in folder.rglob("*.py")]


def test_the_sdist_holds_each_module_once_and_all_that_the_tests_need(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]

    wanted = {
        "Makefile",
        "LICENSE",
        "CHANGELOG.md",
        "CITATION.cff",
        "README.md",
        "constraints.txt",
        "scripts/fetch_pip.py",
    }
    assert wanted | {"tests/conftest.py", ".ci/run"} | {module for name in FOLDERS for module in _in(ROOT / name)} <= {
        *names
    }
    assert not [name for name in names if name.startswith(tuple(f"src/penstock/_{folder}" for folder in FOLDERS))]


def test_the_wheel_can_be_imported_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    command = f"import sys; sys.path.insert(0, {str(wheel)!r}); import penstock._schemas; print(penstock.__file__)"

    ran = subprocess.run(
        [sys.executable, "-I", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert ran.stdout.strip() == str(wheel / "penstock/__init__.py"), ran.stderr


def test_a_script_beside_a_clone_imports_the_package_and_not_the_folder(installed: Installed) -> None:
    script = installed.checkout.parent / "script.py"
    script.write_text("import penstock\nfrom penstock import AdvantageNormalizer\nprint(penstock.__file__)")

    ran = subprocess.run([installed.python, script], capture_output=True, text=True, check=False)

    assert ran.stdout.strip() == str(installed.checkout / "src/penstock/__init__.py"), ran.stderr


def test_an_editable_installation_sees_modules_that_are_added_later(installed: Installed) -> None:
    (installed.checkout / "stages/added_later.py").write_text("ANSWER = 42\n")
    command = "from penstock._stages.added_later import ANSWER; print(ANSWER)"

    ran = subprocess.run([installed.python, "-I", "-c", command], capture_output=True, text=True, check=False)

    assert ran.stdout.strip() == "42", ran.stderr
