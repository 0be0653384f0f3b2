"""Compare the packages on the path with those that pip installs for an extra of penstock.

    PYTHONPATH=.venv/verl .venv/bin/python scripts/check_extra.py verl

Reads pyproject.toml and the metadata of installed packages, and follows every requirement to those of its package.
Prints a line for each package that is absent, or has a version that another one excludes; the exit code is then 1.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]


def problems(extra: str) -> Iterator[str]:
    """Yield the requirements of `penstock[extra]`, and of what it needs, that are not met."""
    waiting = [("penstock", Requirement(f"penstock[{extra}]"))]
    followed: set[tuple[str, str]] = set()
    while waiting:
        wanted_by, wanted = waiting.pop()
        if (problem := problem_of(wanted)) is not None:
            yield f"{wanted_by} needs {wanted}: {problem}"
            continue
        for part in {(wanted.name, extra) for extra in ("", *wanted.extras)} - followed:
            followed.add(part)
            waiting += [(wanted.name, each) for each in needs(*part)]


def problem_of(wanted: Requirement) -> str | None:
    """Return why the installed packages do not meet a requirement; None if they do."""
    if wanted.name == "penstock":
        return None
    try:
        version = distribution(wanted.name).version
    except PackageNotFoundError:
        return "it is not installed"
    return None if wanted.specifier.contains(version, prereleases=True) else f"{version} is installed"


def needs(name: str, extra: str) -> list[Requirement]:
    """Return the requirements of a package, or of one of its extras, that hold in this interpreter."""
    if name == "penstock":
        lines = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    else:
        lines = distribution(name).requires or ()
    listed = [Requirement(line) for line in lines]
    return [each for each in listed if each.marker is None or each.marker.evaluate({"extra": extra})]


if __name__ == "__main__":
    found = sorted(set(problems(sys.argv[1])))
    sys.stdout.write("".join(f"{line}\n" for line in found))
    sys.exit(bool(found))
