"""Install penstock as `pip install -e .` does: a copy of the checkout, and an interpreter that has it installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent

UNWANTED = (".venv", ".git", ".cache", ".*_cache", "runs", "__pycache__", "*.egg-info", "build", "dist")


@dataclass(frozen=True, slots=True)
class Installed:
    """An editable installation of a copy of this checkout."""

    folder: Path

    @property
    def checkout(self) -> Path:
        """The installed checkout: a folder called `penstock`, as `git clone` makes it."""
        return self.folder / "penstock"

    @property
    def python(self) -> Path:
        """The interpreter of a virtual environment that has it, and the packages of the running one."""
        return self.folder / "venv/bin/python"


def copy_checkout(to: Path) -> Path:
    """Copy this checkout, links as links, without what git ignores."""
    return Path(shutil.copytree(ROOT, to, symlinks=True, ignore=shutil.ignore_patterns(*UNWANTED)))


def build(kind: str, source: Path, out: Path) -> None:
    """Build the "sdist", "wheel" or "editable" of `source` into `out`, as pip would."""
    command = f"from setuptools import build_meta; build_meta.build_{kind}({os.fspath(out)!r})"
    ran = subprocess.run([sys.executable, "-c", command], cwd=source, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def build_distributions(folder: Path) -> None:
    """Build the sdist of a copy of this checkout into `folder`, and the wheel from it."""
    copy_checkout(folder / "checkout")
    build("sdist", folder / "checkout", folder)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2, Debian's, has none yet
        archive.extractall(folder)  # noqa: S202 (built here)
    build("wheel", next(folder.glob("penstock-*/")), folder)


def interpreter(folder: Path, *packages: str) -> str:
    """Return the interpreter of a new environment that sees `packages`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text("\n".join(packages))
    return str(folder / "bin/python")


def install_editable(folder: Path) -> None:
    """Install a copy of this checkout into a virtual environment beside it; see `Installed`."""
    installed = Installed(folder)
    build("editable", copy_checkout(installed.checkout), folder)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    packages = _packages_of(installed.python)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(packages)  # noqa: S202 (built here)
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))


def _packages_of(python: Path) -> Path:
    command = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.check_output([python, "-I", "-c", command], text=True).strip())
