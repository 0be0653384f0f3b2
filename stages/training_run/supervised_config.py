"""The keys of a configuration that have no meaning with `algorithm.loss: sft`: the run samples and rewards nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from ..._pipeline.errors import InvalidConfig

SUPERVISED = "sft"
"""The loss of runs that imitate the conversations of their data."""

UNUSED = (
    "data.evaluation",
    "data.curriculum",
    "reward",
    "environment",
    *(
        f"algorithm.{name}"
        for name in (
            "advantages",
            "gamma",
            "gae_lambda",
            "rewards",
            "preset",
            "kl",
            "group_size",
            "max_lag",
            "drop_zero_variance",
            "mask_truncated",
        )
    ),
    "critic",
    "sampling",
    "engine",
    "server",
    *(f"placement.{name}" for name in ("samplers", "servers", "ray", "joining", "python", "sampler_device")),
    "evaluation",
    "samples",
    "record",
)
"""Those keys, and sections of which every key is one."""


def refuse_unused(config: Struct, default: Struct) -> None:
    """Check that `config`, with that loss, has the values of `default` at each key of `UNUSED`.

    Raises:
        InvalidConfig: one has another value.
    """
    for key in UNUSED:
        for name, given in _differences(key, _at(config, key), _at(default, key)):
            raise InvalidConfig(
                f"{name}: expected none beside algorithm.loss {SUPERVISED}, which trains on the messages of data, and "
                f"neither samples, rewards nor evaluates, got {given!r}: remove it"
            )


def _at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


def _differences(key: str, given: Any, default: Any) -> Iterator[tuple[str, Any]]:
    """Yield each key below `key` whose value is not the default, with its value."""
    if isinstance(given, Struct) and type(given) is type(default):
        for name in given.__struct_fields__:
            yield from _differences(f"{key}.{name}", getattr(given, name), getattr(default, name))
    elif given != default:
        yield key, given
