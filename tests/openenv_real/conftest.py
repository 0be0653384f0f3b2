"""As for the other agents; with packages of another folder: `make test-agents`."""

from __future__ import annotations

from tests.agents_real.conftest import (
    _nothing_blocks_the_event_loop as _nothing_blocks_the_event_loop,  # noqa: PLC0414 (a fixture)
)
from tests.agents_real.conftest import chat as chat  # noqa: PLC0414 (a fixture)
