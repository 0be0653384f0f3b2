"""Compare the configuration of a continued run with that in its folder, before anything is read or made."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import structs

from ..._pipeline.durability.resumption import CHECKPOINTS
from ..._pipeline.durability.run_changes import changes_between, config_before, plain, refuse, without_facts
from ..._pipeline.util.checkpoint import latest_checkpoint, step_of
from .key_classes import class_of, is_of_a_mapping
from .run_config import RunConfig

CODE = "code"
"""Key of the digests of the files with the functions that a configuration names, beside its own keys."""


def refuse_changes(config: RunConfig) -> None:
    """Compare `config` with that of the run in its folder, if there is one. Blocks.

    Raises:
        RunDiffers: keys of the class `refused` have other values, and `allow_changes` is false.
    """
    folder = config.run_folder
    latest = latest_checkpoint(folder / CHECKPOINTS)
    if latest is None or (before := config_before(folder, step_of(latest))) is None:
        return
    changes = changes_between(without_facts(before), _own_values(config))
    known = [change for change in changes if change.is_known or is_of_a_mapping(change.key)]
    refused = [change for change in known if class_of(change.key) == "refused"]
    refuse(refused, folder, step_of(latest), allow_changes=config.allow_changes)


def values_of(config: RunConfig) -> dict[str, Any]:
    """Return the values of a configuration as JSON has them, with digests of the code that it names. Blocks."""
    modules = sorted({name.partition(":")[0] for name in _functions(config)} & sys.modules.keys())
    files = {name: Path(path) for name in modules if (path := getattr(sys.modules[name], "__file__", None))}
    code = {name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for name, path in files.items() if path.exists()}
    return _own_values(config) | ({CODE: code} if code else {})


def _own_values(config: RunConfig) -> dict[str, Any]:
    """Return the values; a change is allowed once, and is then the state of the run."""
    values: dict[str, Any] = plain(structs.replace(config, allow_changes=False, skip_damaged=False))
    return values


def _functions(config: RunConfig) -> Iterator[str]:
    """Yield the functions that a configuration names as `module:function`."""
    yield from (each.function for each in config.reward.functions)
    if (environment := config.environment) is not None:
        parts = [name for each in environment.parts for name in (each.make, each.agent)]
        yield from (name for name in (*parts, environment.tools, environment.tool_calls) if name and ":" in name)
    if (evaluation := config.evaluation) is not None:
        yield from (name for name in (evaluation.answer, *(each.make for each in evaluation.environments)) if name)
    named = (config.algorithm.loss, config.prepare, *config.trackers)
    yield from (name for name in named if name and ":" in name)
