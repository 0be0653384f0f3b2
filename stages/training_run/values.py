"""The values of a configuration: those of a file, changed by the environment, changed by `key=value` arguments.

    penstock run config.yaml model.path=./Qwen2.5-0.5B algorithm.optimizer.lr=1e-5
    PENSTOCK__MODEL__PATH=./Qwen2.5-0.5B penstock run config.yaml

The type of the field decides the type of a value. A field of text takes it as it is, `data.system=Answer after ####`; a
number is decimal; a list or a section is YAML, `algorithm.clip=[0.2, 0.28]`, `model.lora={rank: 8}`; null is None if
the field allows it. A path in a file begins at the folder of the file, another one at the current folder; `~` is the
home of the user. Code that the file names may be in a file beside it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..._pipeline.errors import InvalidConfig
from ..._pipeline.util.named_objects import import_from
from ..._schemas.config import load_values, parse_config
from ..._schemas.field_types import types_at
from ..._schemas.yaml_values import parse_argument
from .given_objects import with_names
from .paths import at_home, beside
from .run_config import RunConfig
from .supervised_config import SUPERVISED

PREFIX = "PENSTOCK__"
"""Beginning of the environment variables that are values; two underscores separate the parts of a path."""


def load_run_config(source: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> RunConfig:
    """Return the configuration of a run.

    >>> config = load_run_config({"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "reward": {}}, ["seed=3"])
    >>> (config.model.path, config.seed)
    ('m', 3)

    Args:
        source: a YAML file, or a mapping with the same values; there code may also be given as objects: functions of
            rewards, environments, agents, `loss`, `answer`, `prepare` and trackers. Variables of the environment change
            only those of a file.
        overrides: `path.to.key=value` each, the last one wins.

    Raises:
        InvalidConfig: a value does not fit; the message has its path, the expected and the actual value.
        OSError: the file cannot be read.
    """
    if isinstance(source, str | Path):
        folder = Path(source).parent
        import_from(folder)
        values = beside(load_values(RunConfig, source, root="config"), folder)
        for name, path in _of_environment(os.environ):
            values = _with_text(values, path, os.environ[name], root=name)
    else:
        values = with_names(source)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise InvalidConfig(f"config: expected key=value, for example model.path=./model, got {override!r}")
        values = _with_text(values, key.split("."), text, root=key)
    if values.get("environment") is not None:
        values = {"data": {}, "reward": {}, **values}  # an environment may have both
    algorithm = values.get("algorithm")
    if isinstance(algorithm, Mapping) and algorithm.get("loss") == SUPERVISED:
        values = {"reward": {}, **values}
    return parse_config(RunConfig, at_home(values), root="config")


def _of_environment(names: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the variables that are values, each with the path of its key."""
    before: dict[str, str] = {}
    for name in sorted(name for name in names if name.startswith(PREFIX)):
        key = name.removeprefix(PREFIX).lower()
        if key in before:
            raise InvalidConfig(f"config: expected each key once, got {before[key]} and {name}: remove one")
        before[key] = name
        yield name, key.split("__")


def _with_text(values: Mapping[str, Any], path: list[str], text: str, *, root: str) -> dict[str, Any]:
    """Return `values` with the value that `text` is in the field at `path`."""
    return _with(values, path, parse_argument(text, types_at(RunConfig, path), root=root))


def _with(values: Mapping[str, Any], path: list[str], value: Any, depth: int = 0) -> dict[str, Any]:
    """Return `values` with `value` at `path[depth:]`, in new mappings if there are none."""
    key = path[depth]
    if depth == len(path) - 1:
        return {**values, key: value}
    inner = values.get(key, {})
    if not isinstance(inner, Mapping):
        where = ".".join(path[: depth + 1])
        raise InvalidConfig(f"config: expected a mapping at {where} for {'.'.join(path)}, got {inner!r}")
    return {**values, key: _with(inner, path, value, depth + 1)}
