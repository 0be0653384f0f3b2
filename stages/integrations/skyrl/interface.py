"""The interfaces of SkyRL that the integration uses: imported when training is set up, and checked."""

from __future__ import annotations

import importlib
from typing import Any

from ...._pipeline.errors import MissingInterface
from ..framework_version import warn_untried

TRIED = ("0.4.0",)
"""The versions of SkyRL that the tests run."""

HOOKS = ("train", "init_weight_sync_state", "convert_to_training_input", "save_checkpoints", "load_checkpoints")
"""Methods of both of its trainers that are extended."""

ASYNC_HOOKS = ("_collect_generation_mini_batch", "convert_generation_group_mini_batch_to_training_input")
"""Those of its fully asynchronous trainer."""


def name_of(module: str, name: str) -> Any:
    """Return the object called `name` in a module of SkyRL.

    Raises:
        MissingExtra: SkyRL is not installed.
        MissingInterface: it has no such module or name.
    """
    installed = warn_untried("skyrl", TRIED)
    try:
        return getattr(importlib.import_module(f"skyrl.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise MissingInterface(
            f"expected skyrl.{module}.{name}, found none in SkyRL {installed} ({error}): install skyrl=={TRIED[-1]}"
        ) from error


def check_trainer(trainer: type) -> bool:
    """Check that a class is a trainer of SkyRL with the methods that are extended; return whether it is asynchronous.

    Raises:
        MissingInterface: it lacks one.
    """
    fully_async = name_of("train.fully_async_trainer", "FullyAsyncRayPPOTrainer")
    is_async = issubclass(trainer, fully_async)
    for hook in (*HOOKS, *(ASYNC_HOOKS if is_async else ())):
        if not callable(getattr(trainer, hook, None)):
            raise MissingInterface(
                f"expected {trainer.__name__}.{hook}, found none: give a trainer of SkyRL, of skyrl=={TRIED[-1]}"
            )
    return is_async
