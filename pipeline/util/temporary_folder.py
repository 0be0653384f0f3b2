"""The folder for temporary files."""

from __future__ import annotations

import tempfile
from pathlib import Path


def temporary_folder() -> Path:
    """Return the folder for temporary files of this process. Blocks.

    That is one of those that Python tries, TMPDIR first; where none can be written, /tmp: there the caller's attempt to
    make a file raises the reason.
    """
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return Path("/tmp")  # noqa: S108 (nothing is made here)
