"""The cores are measured where they are used: tracing would only double the time that the models take."""

from collections.abc import Iterator

import coverage
import pytest


@pytest.fixture(autouse=True)
def _models_are_not_traced() -> Iterator[None]:
    tracing = coverage.Coverage.current()
    if tracing is not None:
        tracing.stop()
    yield
    if tracing is not None:
        tracing.start()
