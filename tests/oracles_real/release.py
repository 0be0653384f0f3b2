"""Run the code of a peer from its pinned release, without the packages that the peer as a whole needs.

`Release` reads a file of the release, and executes of it what a function uses, when the function uses it: the
definition, the constants and functions that it names, and these of other files of the release. Its code runs as it is
written. Packages such as Ray or flash-attn are imported only if the code that runs names them.

    installed("verl").get("verl.trainer.ppo.core_algos", "agg_loss")

Decorators that enter a function in a registry are left out, for a registry may be an actor of Ray; and so is
`torch.compile`, which needs a compiler of C++.
"""

from __future__ import annotations
import __future__

import ast
import importlib
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Release", "checkout", "imported", "installed"]

LEFT_OUT = re.compile(r"register|torch\.compile|.*\.register")
"""Beginning of decorators that are left out."""


class Names(dict[str, Any]):
    """The global names of a file; each is defined when it is looked up first."""

    def __init__(self, release: Release, module: str, file: Path) -> None:
        super().__init__(__name__=__name__)  # dataclasses look for the module of a class
        self._release = release
        self._package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        self._file = file
        every = list(statements(ast.parse(file.read_text()).body))
        self._statements = {name: each for each in every for name in named(each)}
        self._stars = [each for each in every if isinstance(each, ast.ImportFrom) and each.names[0].name == "*"]
        self._begun: set[str] = set()

    def __missing__(self, name: str) -> Any:
        statement = self._statements.get(name)
        if statement is None or name in self._begun:
            return self._from_stars(name)
        self._begun.add(name)
        if isinstance(statement, ast.Import | ast.ImportFrom):
            self[name] = self._import(statement, name)
        else:
            self._execute(statement)
        return self[name]

    def _from_stars(self, name: str) -> Any:
        """Return the value of a name that `from … import *` binds."""
        for each in self._stars if not name.startswith("_") else ():
            with suppress(AttributeError):
                return getattr(self._release.module(self._source(each)), name)
        raise KeyError(name)

    def get_or_define(self, name: str) -> Any:
        """Return what a name denotes, or None."""
        try:
            return self[name]
        except KeyError:
            return None

    def _execute(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            statement.decorator_list = [
                each for each in statement.decorator_list if not LEFT_OUT.match(ast.unparse(each))
            ]
        for each in read_at_once(statement):  # the body of a class does not ask `__missing__`
            self.get_or_define(each)
        whole = ast.Module([statement], [])
        flags = __future__.annotations.compiler_flag  # annotations name what no code needs
        exec(compile(whole, str(self._file), "exec", flags, dont_inherit=True), self)  # noqa: S102 (that is its purpose)

    def _import(self, statement: ast.Import | ast.ImportFrom, name: str) -> Any:
        (alias,) = (each for each in statement.names if bound(statement, each) == name)
        if isinstance(statement, ast.Import):
            return self._release.module(alias.name if alias.asname else name)
        return getattr(self._release.module(self._source(statement)), alias.name)

    def _source(self, statement: ast.ImportFrom) -> str:
        """Return the module that a statement imports from."""
        package = self._package.rsplit(".", statement.level - 1)[0] if statement.level else ""
        return ".".join(filter(None, [package, statement.module]))


class Module:
    """A file or a folder of a release, by attributes as an imported module."""

    def __init__(self, release: Release, name: str, names: Names | None) -> None:
        self._release, self._name, self._names = release, name, names

    def __getattr__(self, name: str) -> Any:
        found = None if self._names is None else self._names.get_or_define(name)
        if found is None:
            found = self._release.find(f"{self._name}.{name}")
        if found is None:
            raise AttributeError(f"{self._name}.{name}")
        return found


@dataclass
class Release:
    """The files of a peer."""

    name: str
    root: Path
    _modules: dict[str, Module | None] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return self.name

    def get(self, module: str, name: str) -> Any:
        """Return a function or a class; without it, the test fails with the name of the release."""
        try:
            return getattr(self.module(module), name)
        except (AttributeError, ImportError) as error:
            pytest.fail(
                f"{self.name}: expected {module}.{name}, got none ({error}): compare with what replaced it, or add a "
                f"package that it imports to scripts/oracles/requirements.txt"
            )

    def module(self, name: str) -> Any:
        """Return a module of this release, or another one that is installed."""
        found = self.find(name)
        return importlib.import_module(name) if found is None else found

    def find(self, name: str) -> Module | None:
        """Return a module of this release."""
        if name not in self._modules:
            at = self.root.joinpath(*name.split("."))
            files = [file for file in (at.with_suffix(".py"), at / "__init__.py") if file.is_file()]
            names = Names(self, name, files[0]) if files else None
            self._modules[name] = Module(self, name, names) if files or at.is_dir() else None
        return self._modules[name]


class Imported(Release):
    """A release that can be imported as it is."""

    def find(self, name: str) -> None:
        """Return None: all modules are installed."""


def installed(package: str) -> Release:
    """Return the release of a package on the path, named after its version."""
    found = distribution(package)
    return Release(f"{package}-{found.version}", Path(str(found.locate_file(""))))


def imported(package: str) -> Release:
    """Return the release of a package on the path, for code that needs all of it."""
    found = distribution(package)
    return Imported(f"{package}-{found.version}", Path(str(found.locate_file(""))))


def checkout(variable: str, folder: str = ".") -> Release:
    """Return the checkout that an environment variable names; without one, the test is skipped."""
    given = os.environ.get(variable)
    if not given:
        pytest.skip(f"{variable} names no checkout")
    return Release(f"{variable} at {given}", Path(given).absolute() / folder)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Return the statements of a file, with those inside `if` and `try`; of two definitions, the first wins."""
    for each in reversed(body):
        if isinstance(each, ast.If):
            yield from statements(each.body + each.orelse)
        elif isinstance(each, ast.Try):
            yield from statements(each.body)
        else:
            yield each


def named(statement: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    match statement:
        case ast.FunctionDef() | ast.ClassDef():
            return [statement.name]
        case ast.Import() | ast.ImportFrom():
            return [bound(statement, alias) for alias in statement.names]
        case ast.Assign():
            return [name.id for each in statement.targets for name in ast.walk(each) if isinstance(name, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
            return [name]
    return []


def bound(statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    """Return the name that an import binds."""
    whole = alias.asname or alias.name
    return whole.split(".")[0] if isinstance(statement, ast.Import) else whole


def read_at_once(statement: ast.AST) -> Iterator[str]:
    """Return the names that a statement reads when it is executed: not those in bodies of functions."""
    if isinstance(statement, ast.Name):
        yield statement.id
    for part, value in ast.iter_fields(statement):
        if isinstance(statement, ast.FunctionDef | ast.Lambda) and part == "body":
            continue
        if part in ("annotation", "returns"):
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST):
                yield from read_at_once(each)
