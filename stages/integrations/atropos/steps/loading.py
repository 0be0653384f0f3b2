"""Where an Atropos environment's class comes from: a module, or a file that is part of no package.

A file is loaded under a name of its own. `sys.path` stays as it is, so what lies beside the file is not found by it.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import threading
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from .....pipeline.errors import InvalidConfig

__all__ = ["Make", "loaded"]

Make: TypeAlias = Callable[..., Any]
"""An environment's class, or what is called like it."""

_loading: dict[str, threading.Lock] = {}
"""By name: a file is executed once, whoever asks for it, and one that blocks holds up no other."""


def loaded(where: str) -> Make:
    """The class that `where` names: `package.module:Class`, or `folder/file.py:Class`.

    >>> loaded("collections:OrderedDict").__name__
    'OrderedDict'

    Raises:
        InvalidConfig: there is no such file, module or class.
        Exception: whatever the module raises when it is imported.
    """
    home, _, name = where.rpartition(":")
    if not home or not name:
        raise InvalidConfig(f"environment: expected package.module:Class or folder/file.py:Class, got {where!r}")
    module = _from_file(Path(home)) if home.endswith(".py") else _imported(home)
    made: Make | None = getattr(module, name, None)
    if not callable(made):
        raise InvalidConfig(f"environment: expected a class {name} in {home}, got {_classes_of(module)}")
    return made


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # something that the module imports is missing
        raise InvalidConfig(
            f"environment: expected a module {name}, got none: is it installed? Or name a file"
        ) from None


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InvalidConfig(f"environment: expected a file, got nothing at {path.absolute()}")
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    name = f"_penstock_environment_{path.stem}_{digest}"
    with _loading.setdefault(name, threading.Lock()):
        return sys.modules[name] if name in sys.modules else _executed(name, path)


def _executed(name: str, path: Path) -> ModuleType:
    loader = SourceFileLoader(name, str(path))
    module = ModuleType(name)
    module.__file__, module.__loader__ = str(path), loader
    sys.modules[name] = module  # dataclasses and pydantic look up there what annotations mean
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _classes_of(module: ModuleType) -> str:
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return ", ".join(sorted(own)) or "none"
