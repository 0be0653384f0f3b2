"""Disable coverage in models, which visit hundreds of thousands of states; other tests cover the same code."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _untraced() -> Iterator[None]:
    """Disable tracing for coverage, which would take longer than the search."""
    tracer = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(tracer)
