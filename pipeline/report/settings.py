"""The configuration of a run and of each part that was continued with other values, a line for each key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from ..durability.run_changes import STAGES, parts_of
from ..errors import FileDamaged
from ..util.json_file import read_json

MOST_KEYS = 1_000
"""Keys of a part that are shown."""

LONGEST_VALUE = 500
"""Characters of a value that are shown."""


class PartSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of one part of a run."""

    begins: int
    """The step that it continues from; 0 for the first."""
    values: dict[str, str]
    """By key, as JSON."""
    fault: str = ""
    """The reason why its file cannot be read."""


def read_settings(folder: Path) -> list[PartSettings]:
    """Return the configuration of each part of the run in `folder`. Blocks."""
    return [_part(path, begins) for path, begins in parts_of(folder) if path.is_file()]


def _part(path: Path, begins: int) -> PartSettings:
    try:
        values = read_json(path, dict[str, Any], remedy="remove the file")
        given = {key: value for key, value in values.items() if key != STAGES}
        return PartSettings(begins=begins, values=dict(islice(_lines(given), MOST_KEYS)))
    except (FileDamaged, OSError, RecursionError) as error:
        return PartSettings(begins=begins, values={}, fault=str(error))


def _lines(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path of each innermost value, and its JSON."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _lines(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
        for number, inner in enumerate(value):
            yield from _lines(inner, f"{key}[{number}]")
    else:
        text = msgspec.json.encode(value).decode()
        yield key[:LONGEST_VALUE], text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"
