"""Models walk through hundreds of thousands of states; what they run of penstock is measured where it stands alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _untraced() -> Iterator[None]:
    """Tracing every line of every state for coverage would take longer than the states themselves."""
    tracer = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(tracer)
