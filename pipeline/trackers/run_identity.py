"""The identity of a run at a tracker, kept in the run's folder: a run that is continued is the same run there."""

from __future__ import annotations

import re
import secrets

from ..util.atomic_file import write_atomically
from ..util.json_file import set_aside
from .tracker import RunInfo


def identity_of(run: RunInfo, tracker: str) -> str:
    """Return the identity of a run at `tracker`: the one that it began with, or a new one. Blocks.

    Eight hexadecimal digits, in the file `<tracker>-id.txt` of its folder. A run without a folder has a new one.
    """
    path = None if run.folder is None else run.folder / f"{tracker}-id.txt"
    if path is not None and run.step and path.exists():
        found = path.read_bytes()
        if re.fullmatch(rb"[0-9a-f]{8}", found):
            return found.decode()
        set_aside(path, f"{found[:16]!r}", f"the metrics go on in a new run of {tracker}")
    name = secrets.token_hex(4)
    if path is not None:
        write_atomically(path, name.encode())
    return name
