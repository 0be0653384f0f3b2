"""The flow of a tag that names an environment of Atropos, and its interpreter, in place of a function.

Atropos scores groups; ROLL's own env managers play one rollout at a time, so they cannot play it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...._pipeline.errors import InvalidConfig
from ...._pipeline.runtime.flow import source
from ...._pipeline.util.named_objects import import_object
from ...sampling.source_env import SourceEnv
from ..atropos import AtroposEnvironment
from .job import RollJob


def flow_function(tag: Mapping[str, Any], root: str) -> Callable[[RollJob], Any]:
    """Return the function that makes the flow of a tag: that of `flow`, or one that samples the environment `atropos`.

    Raises:
        InvalidConfig: `flow` names no function, both keys are there or neither is, or `python` lacks `atropos`.
    """
    named = [key for key in ("flow", "atropos") if tag.get(key) is not None]
    if len(named) != 1:
        raise InvalidConfig(
            f"{root}: expected one of flow, the function that makes a flow, and atropos, an environment of Atropos, "
            f"got {' and '.join(named) or 'none'}"
        )
    if named == ["atropos"]:
        return lambda job: source(atropos_source(job, str(tag["atropos"]), tag.get("python")))
    if tag.get("python") is not None:
        raise InvalidConfig(f"{root}.python: expected none without atropos, whose interpreter it names")
    found: Callable[[RollJob], Any] = import_object(tag["flow"], f"{root}.flow")
    return found


def atropos_source(job: RollJob, where: str, python: str | None) -> SourceEnv:
    """Return a source of the groups of an Atropos environment, with ROLL's policy as its model.

    Args:
        job: of the tag; its `options` are fields of the environment's configuration.
        where: see `AtroposEnvironment`.
        python: see `AtroposEnvironment`.

    Raises:
        InvalidConfig: `model` is no folder with a tokenizer.
    """
    config = {"tokenizer_name": job.model, **job.options}
    environment = AtroposEnvironment(where, config=config, group_size=job.group_size, python=python)
    return SourceEnv(environment, job.policy, job.tokenizer, sampling=job.sampling, **job.pace)
