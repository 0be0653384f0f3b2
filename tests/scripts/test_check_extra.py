"""Targets that run a framework begin with a look at its packages: they are those that pip installs for the extra."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent.parent / "scripts/check_extra.py"


def check(extra: str, path: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(path)}
    return subprocess.run([sys.executable, SCRIPT, extra], capture_output=True, text=True, check=False, env=environment)


def install(folder: Path, name: str, version: str, *requirements: str) -> None:
    """Write the metadata of a package into `folder`."""
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {line}" for line in requirements)]
    (folder / f"{name}-{version}.dist-info").mkdir()
    (folder / f"{name}-{version}.dist-info" / "METADATA").write_text("\n".join(["Metadata-Version: 2.4", *lines, ""]))


def test_the_packages_of_an_extra_that_is_installed_whole_pass(tmp_path: Path) -> None:
    ran = check("train", tmp_path)

    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr


def test_a_package_that_another_one_excludes_or_lacks_is_named(tmp_path: Path) -> None:
    install(tmp_path, "ray", "2.60.0", "transformers<5", "ray-tools[all]>=1", "unused; extra == 'rest'")
    install(tmp_path, "transformers", "5.11.0")
    install(tmp_path, "ray_tools", "1.0", "absent>=2; extra == 'all'")

    ran = check("ray", tmp_path)

    assert ran.returncode == 1
    assert ran.stdout.splitlines() == [
        "ray needs transformers<5: 5.11.0 is installed",
        'ray-tools needs absent>=2; extra == "all": it is not installed',
    ]
