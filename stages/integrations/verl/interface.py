"""The interfaces of verl that the integration uses: imported when its trainer starts, and checked."""

from __future__ import annotations

import importlib
from typing import Any

from ...._pipeline.errors import MissingInterface
from ..framework_version import warn_untried

TRIED = ("0.9.1",)
"""The versions of verl that the tests run."""


def needed(module: str, *names: str) -> Any:
    """Return a module of verl, or of one of the packages that it is installed with, that has these names.

    Raises:
        MissingExtra: verl is not installed.
        MissingInterface: there is no such module, or it lacks a name.
    """
    installed = warn_untried("verl", TRIED)
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise MissingInterface(
            f"expected {module}, found none beside verl {installed} ({error}): install verl[verl-core]=={TRIED[-1]}"
        ) from error
    if missing := [name for name in names if not hasattr(found, name)]:
        raise MissingInterface(
            f"expected {module} to have {missing}, found none of that name beside verl {installed}: "
            f"install verl=={TRIED[-1]}"
        )
    return found
