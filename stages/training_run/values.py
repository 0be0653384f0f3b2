"""The values of a configuration: those of a file, changed by the environment, changed by `key=value` arguments.

    penstock run config.yaml model.path=./Qwen2.5-0.5B algorithm.optimizer.lr=1e-5
    PENSTOCK__MODEL__PATH=./Qwen2.5-0.5B penstock run config.yaml

A value is YAML: `algorithm.clip=[0.2, 0.28]`, `model.lora={rank: 8}`, `data.system=null`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..._pipeline.errors import InvalidConfig
from ..._schemas.config import load_values, parse_config, parse_yaml
from .run_config import RunConfig

PREFIX = "PENSTOCK__"
"""Beginning of the environment variables that are values; two underscores separate the parts of a path."""


def load_run_config(source: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> RunConfig:
    """Return the configuration of a run.

    >>> config = load_run_config({"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "reward": {}}, ["seed=3"])
    >>> (config.model.path, config.seed)
    ('m', 3)

    Args:
        source: a YAML file, or a mapping with the same values. The environment changes only those of a file.
        overrides: `path.to.key=value` each, the last one wins.

    Raises:
        InvalidConfig: a value does not fit; the message has its path, the expected and the actual value.
        OSError: the file cannot be read.
    """
    from_file = isinstance(source, str | Path)
    values = load_values(source, root="config") if isinstance(source, str | Path) else _copied(source)
    if from_file:
        for path, value in _of_environment(os.environ):
            _set(values, path, value)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise InvalidConfig(f"config: expected key=value, for example model.path=./model, got {override!r}")
        _set(values, key.split("."), parse_yaml(text, root=key))
    return parse_config(RunConfig, values, root="config")


def _of_environment(environment: Mapping[str, str]) -> Iterator[tuple[list[str], Any]]:
    for name in sorted(environment):
        if name.startswith(PREFIX):
            path = name.removeprefix(PREFIX).lower().split("__")
            yield path, parse_yaml(environment[name], root=name)


def _set(values: dict[str, Any], path: list[str], value: Any) -> None:
    """Set the value at `path`, in mappings that are made where there are none."""
    *parents, key = path
    inner: Any = values
    for depth, parent in enumerate(parents):
        inner = inner.setdefault(parent, {})
        if inner is None or not isinstance(inner, dict):
            where = ".".join(parents[: depth + 1])
            raise InvalidConfig(f"config: expected a mapping at {where} for {'.'.join(path)}, got {inner!r}")
    inner[key] = value


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in values.items()}
