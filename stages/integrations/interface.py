"""The interfaces of foreign frameworks: looked up when training starts, with one error where a name is missing.

A version that the tests did not run is used, with a warning.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import version
from typing import Any

from ..._pipeline.accounting.telemetry import get_logger
from ..._pipeline.errors import MissingInterface
from ..._pipeline.util.extras import extra

log = get_logger("penstock.integrations")

TRIED = {"skyrl": "0.4.0", "trl": "1.16.0", "verl": "0.9.1"}
"""The version of each framework that the tests run. A key is also the name of its package, of its distribution, of
penstock's extra and of `penstock.integrations`."""


@cache
def installed_version(framework: str) -> str:
    """Return the version of the installed framework; warn once if it is not the one that was tried.

    Raises:
        MissingExtra: it is not installed.
    """
    with extra(framework, f"penstock.integrations.{framework}"):
        importlib.import_module(framework)
    installed = version(framework)
    if installed != TRIED[framework]:
        log.warning("framework_version_untried", framework=framework, version=installed, tried=TRIED[framework])
    return installed


def module_with(framework: str, module: str, *names: str) -> Any:
    """Return a module of the framework, or of a package that is installed with it, that has these names.

    Raises:
        MissingExtra: the framework is not installed.
        MissingInterface: there is no such module, or it lacks a name.
    """
    installed, sought = installed_version(framework), module
    try:
        found = importlib.import_module(module)
        for name in names:
            sought = f"{module}.{name}"
            getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise MissingInterface(
            f"expected {sought}, found none beside {framework} {installed} ({error}): "
            f"install {framework}=={TRIED[framework]}"
        ) from error
    return found


def object_in(framework: str, module: str, name: str) -> Any:
    """Return the object called `name` in a module; see `module_with`."""
    return getattr(module_with(framework, module, name), name)
