"""Import modules of an optional extra: where one is absent, the error gives the command that installs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import MissingExtra
from .installation import install_command


@contextmanager
def extra(name: str, needed_by: str) -> Iterator[None]:
    """Import modules within the body that the extra `name` installs.

    Raises:
        MissingExtra: a module is not installed; the message names it, `needed_by`, and the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == __name__.partition(".")[0]:  # a mistake of ours, not an absent dependency
            raise
        raise MissingExtra(f"{needed_by} needs {missing}, which is not installed: {install_command(name)}") from error
