"""Import the object that a configuration names as `module:name`: code is named there and never written into YAML."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from ..._schemas.config import nearest
from ..errors import InvalidConfig, PenstockError
from .raised_places import located_text
from .user_code import call_user

_named: dict[str, Any] = {}
"""The objects that a configuration was given as values, by the names that stand for them."""


def name_of(given: Any) -> str:
    """Return the name that stands for an object that is given as a value; `import_object` finds it in this process.

    Another object of the same name, such as a function that a notebook defines again, gets a number.
    """
    described = given if hasattr(given, "__qualname__") else type(given)
    module = getattr(described, "__module__", None) or "builtins"
    base = f"{module}:{re.sub(r'[^A-Za-z0-9_.]', '', described.__qualname__)}"
    name, numbers = base, itertools.count(2)
    while _named.setdefault(name, given) is not given:
        name = f"{base}_{next(numbers)}"
    return name


def import_object(name: str, root: str = "config") -> Any:
    """Return the object that `module:name` names; like a script, it can be in a file of the current folder.

    It can also be in one of a folder of `import_from`, or be given as a value (`name_of`).

    >>> import_object("math:sqrt")(9)
    3.0

    Args:
        name: the module, a colon, and the name within it, with dots if need be.
        root: the path of the value, at the beginning of error messages.

    Raises:
        InvalidConfig: `name` has another form, there is no such module or no such name in it, or the module raised
            while it was imported.
    """
    if name in _named:
        return _named[name]
    place, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in [*place.split("."), *attribute.split(".")]):
        raise InvalidConfig(f"{root}: expected module:name, for example reward:accuracy, got {name!r}")
    found: Any = _imported(place, root)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise InvalidConfig(f"{root}: expected a name in {place}, got {attribute!r}{nearest(part, dir(found))}")
        found = getattr(found, part)
    return found


def import_from(folder: Path) -> None:
    """Have modules found in `folder` too, as in that of a script."""
    path = str(folder.absolute())
    if path not in sys.path:  # stays: worker processes are given this path
        sys.path.insert(0, path)


def _imported(place: str, root: str) -> ModuleType:
    folder = str(Path.cwd())
    import_from(Path(folder))
    importlib.invalidate_caches()
    try:
        return call_user(importlib.import_module, place)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{place}.".startswith(f"{error.name}."):
            known = [path.stem for path in Path(folder).glob("*.py")]
            raise InvalidConfig(
                f"{root}: expected a module that is installed or a file in {folder}, got {place!r}"
                f"{nearest(place, known)}"
            ) from None
        raise InvalidConfig(
            f"{root}: expected a module that can be imported, got {place!r}, which raised {located_text(error)}"
        ) from error


def call_object(name: str, root: str, *arguments: Any) -> Any:
    """Return the result of the function that `module:name` names.

    Raises:
        InvalidConfig: see `import_object`; or it is no function of these arguments, or raised.
        PenstockError: raised by the function.
    """
    function = import_object(name, root)
    if not callable(function):
        raise InvalidConfig(f"{root}: expected a function, got {name}, which is {type(function).__name__}")
    try:
        return call_user(function, *arguments)
    except (PenstockError, OSError):
        raise
    except Exception as error:
        raise InvalidConfig(f"{root}: expected {name} to return, got {located_text(error)}") from error
