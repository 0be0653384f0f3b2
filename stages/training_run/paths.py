"""The paths of a configuration: those in a file are of the folder of the file, others of the current one.

`~` is the home of the user. A name of Hugging Face's hub stays as it is: its files are downloaded where they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..._pipeline.util.hub import is_hub_name
from .places import changed_at

PATHS = (
    "model.path",
    "critic.model",
    "data.path",
    "data.sets.[].path",
    "evaluation.sets.[].path",
    "folder",
    "replay.run",
    "server.weights",
    "placement.joining.key",
)
"""The keys that are paths; `[]` is any place."""

PROGRAMS = ("placement.python", "placement.servers.python")
"""The keys that are paths, or the names of programs."""


def beside(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the values of a file with its paths: these begin at `folder`, that of the file."""
    if folder == Path():
        return dict(values)
    makes_files = values.get("prepare") is not None

    def within(text: str) -> str:
        is_named = is_hub_name(text, folder) and not makes_files
        return text if is_named or text.startswith("~") else str(folder / text)

    return with_paths({"folder": "run", **values}, within)


def at_home(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with `~` replaced in paths."""
    return with_paths(values, lambda text: str(Path(text).expanduser()) if text.startswith("~") else text)


def with_paths(values: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Return values with each path changed; those of other types stay, and are refused later."""

    def changed(value: Any) -> Any:
        return change(value) if value and isinstance(value, str) else value

    found: Any = values
    for key in PATHS:
        found = changed_at(found, key, changed)
    for key in PROGRAMS:
        found = changed_at(found, key, lambda value: changed(value) if "/" in str(value) else value)
    return dict(found)
