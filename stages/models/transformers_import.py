"""Import transformers where a model is made or read: it takes seconds, and the extra `train` installs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..._pipeline.util.extras import extra


def import_transformers(needed_by: str) -> Any:
    """Return the module.

    Raises:
        MissingExtra: it is not installed.
    """
    with extra("train", needed_by):
        import transformers  # noqa: PLC0415 (as above)
    return transformers


@contextmanager
def quiet_transformers(needed_by: str) -> Iterator[Any]:
    """Yield the module, silent about progress within the body: a run has a view of its own.

    Raises:
        MissingExtra: it is not installed.
    """
    transformers = import_transformers(needed_by)
    logging = transformers.utils.logging
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield transformers
    finally:
        if enabled:
            logging.enable_progress_bar()
