"""Import the object that a configuration names as `module:name`: code is named there and never written into YAML."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from ..._schemas.config import nearest
from ..errors import InvalidConfig
from .user_code import call_user


def import_object(name: str, root: str = "config") -> Any:
    """Return the object that `module:name` names; like a script, it can be in a file of the current folder.

    >>> import_object("math:sqrt")(9)
    3.0

    Args:
        name: the module, a colon, and the name within it, which may contain dots.
        root: the path of the value, at the beginning of error messages.

    Raises:
        InvalidConfig: `name` has another form, or there is no such module or no such name in it.
        Exception: raised by the module while it was imported.
    """
    place, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in [*place.split("."), *attribute.split(".")]):
        raise InvalidConfig(f"{root}: expected module:name, for example reward:accuracy, got {name!r}")
    found: Any = _imported(place, root)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise InvalidConfig(f"{root}: expected a name in {place}, got {attribute!r}{nearest(part, dir(found))}")
        found = getattr(found, part)
    return found


def _imported(place: str, root: str) -> ModuleType:
    folder = str(Path.cwd())
    if folder not in sys.path:  # stays: worker processes are given this path
        sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        return call_user(importlib.import_module, place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # of a module that this one imports
        known = [path.stem for path in Path(folder).glob("*.py")]
        raise InvalidConfig(
            f"{root}: expected a module that is installed or a file in {folder}, got {place!r}{nearest(place, known)}"
        ) from None
