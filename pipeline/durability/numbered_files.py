"""The numbered files of a folder that one version of their format wrote: `<number>.<what>-<version>`."""

from __future__ import annotations

import re
from pathlib import Path

from ..._schemas import ProtocolMismatch


def numbered_files(folder: Path, name: re.Pattern[str], version: int, what: str, remedy: str) -> list[tuple[int, Path]]:
    """Return the files in `folder` whose names match, by their numbers. Blocks.

    Args:
        folder: where they lie; others may lie beside them.
        name: its groups are the number, and the version of the format.
        version: of the format that can be read.
        what: they are, for the error.
        remedy: what to do with those of another version.

    Raises:
        ProtocolMismatch: one is of another version.
    """
    found = []
    for path in folder.iterdir():
        if (matched := name.fullmatch(path.name)) is None:
            continue
        if int(matched[2]) != version:
            raise ProtocolMismatch(f"expected {what} of version {version} in {folder}, got {path.name}: {remedy}")
        found.append((int(matched[1]), path))
    return sorted(found)
