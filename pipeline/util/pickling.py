"""Pickle values for another process of this host.

A child imports the script of its parent for the names that it defines. A script from standard input (`python -`), from
an argument (`python -c`) or of an interactive session (a notebook) is in no file that a child could import: functions
and classes that it defines are pickled by value.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

MAIN = "__main__"


def main_is_in_a_file() -> bool:
    """Return whether another process can import the `__main__` of this one."""
    main = sys.modules[MAIN]
    path = getattr(main, "__file__", None)
    return getattr(main, "__spec__", None) is not None or (path is not None and Path(path).exists())


def pickled(value: object) -> bytes:
    """Return the pickle of `value`, for `pickle.loads`. Blocks.

    Raises:
        Exception: raised by pickling a part of it.
    """
    if main_is_in_a_file():
        return pickle.dumps(value)
    import cloudpickle  # noqa: PLC0415 (few processes need it)

    by_value: bytes = cloudpickle.dumps(value)
    return by_value


def needs_main(content: bytes) -> bool:
    """Return whether the reader of a pickle has to import the script of this process first."""
    return main_is_in_a_file() and MAIN.encode() in content
