"""The interfaces of TRL that the integration uses: imported when training starts, and compared with what it needs."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from ...._pipeline.errors import MissingInterface
from ..framework_version import warn_untried
from .samples import FIELDS

TRIED = ("1.16.0",)
"""The versions of TRL that the tests run."""

MODULE = "trl.experimental.async_grpo.async_rollout_worker"

NEEDED_BY = "penstock.integrations.trl"


def rollout_sample() -> Any:
    """Return TRL's class of samples.

    Raises:
        MissingExtra: TRL is not installed.
        MissingInterface: it has no such class, or the class lacks a field.
    """
    installed = warn_untried("trl", TRIED)
    try:
        found = importlib.import_module(MODULE).RolloutSample
    except (ImportError, AttributeError) as error:
        raise MissingInterface(
            f"expected {MODULE}.RolloutSample, found none in TRL {installed} ({error}): install trl=={TRIED[-1]}"
        ) from error
    fields = {field.name for field in dataclasses.fields(found)}
    if missing := set(FIELDS) - fields:
        raise MissingInterface(
            f"expected RolloutSample to have {sorted(missing)}, found {sorted(fields)} in TRL {installed}: "
            f"install trl=={TRIED[-1]}"
        )
    return found
