"""As for the other agents; with packages of another folder: `make test-agents`."""

from __future__ import annotations

import asyncio

import pytest
from tests.agents_real.conftest import (
    _nothing_blocks_the_event_loop as _nothing_blocks_the_event_loop,  # noqa: PLC0414 (a fixture)
)


@pytest.fixture(autouse=True)
def _loop_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test's event loop a lock: that of renderers belongs to the first loop that waits."""
    monkeypatch.setattr("renderers.client._max_prompt_len_lock", asyncio.Lock())
