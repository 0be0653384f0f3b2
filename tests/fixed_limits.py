"""Change limits of penstock that no option sets, for tests that reach one in milliseconds."""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["set_limits"]

MODULES = {
    "AT_ONCE": ["_pipeline.channels.router_socket"],
    "ANSWER_TIMEOUT_S": ["_pipeline.channels.tcp"],
    "BACKOFF": ["_stages.integrations.atropos.http_api"],
    "CANCELLED_RESUME_TIMEOUT_S": ["_stages.engines.http_engine"],
    "CANCEL_TIMEOUT_S": ["_pipeline.weights.engine_sync"],
    "CHECK_INTERVAL_S": ["_pipeline.channels.tcp_acceptor"],
    "CHECK_S": ["_pipeline.workers.loop_watch"],
    "CHUNK_BYTES": ["_pipeline.weights.folder_mirror"],
    "CLOSE_TIMEOUT_S": ["_pipeline.channels.remote_sender"],
    "HANDSHAKE_S": ["_pipeline.channels.pending_handshakes"],
    "LARGEST_MESSAGE": ["_pipeline.channels.peers", "_pipeline.channels.tcp"],
    "LEAST_WARNED_AT": ["_pipeline.accounting.progress_guard"],
    "MAX_HANDSHAKES": ["_pipeline.channels.pending_handshakes"],
    "MOST_REQUESTS": ["_pipeline.weights.weight_server"],
    "MOST_UNREAD_BYTES": ["_pipeline.weights.weight_server"],
    "NAMED_S": ["_pipeline.workers.loop_watch"],
    "POLL_S": ["_pipeline.weights.folder_mirror"],
    "POLLS": ["_stages.integrations.atropos.client"],
    "RECONNECT_TIMEOUT_S": ["_pipeline.weights.weight_mirror", "_pipeline.weights.weight_subscriber"],
    "SLEEP_TIMEOUT_S": ["_pipeline.weights.engine_sync"],
    "STEP_POLL_S": ["_stages.integrations.atropos.server.gateway"],
    "WORKER_HEARTBEAT_TIMEOUT_S": ["_pipeline.workers.workers"],
}
"""The modules that use each limit."""


def set_limits(monkeypatch: pytest.MonkeyPatch, **limits: Any) -> None:
    """Set limits by name, until the test ends or `monkeypatch.undo()` is called."""
    for name, value in limits.items():
        for module in MODULES[name]:
            monkeypatch.setattr(f"penstock.{module}.{name}", value)
