"""The versions of a foreign framework: one that the tests did not run is used, with a warning."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import version

from ..._pipeline.accounting.telemetry import get_logger
from ..._pipeline.util.extras import extra

log = get_logger("penstock.integrations")


@cache
def warn_untried(framework: str, tried: tuple[str, ...]) -> str:
    """Warn once if the installed framework has none of the versions that were tried; return its version.

    Args:
        framework: the name of its package, of its distribution, of penstock's extra and of `penstock.integrations`.
        tried: versions that the tests run.

    Raises:
        MissingExtra: it is not installed.
    """
    with extra(framework, f"penstock.integrations.{framework}"):
        importlib.import_module(framework)
    installed = version(framework)
    if installed not in tried:
        log.warning("framework_version_untried", framework=framework, version=installed, tried=", ".join(tried))
    return installed
