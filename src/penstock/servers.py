"""External servers as parts of a run."""

from __future__ import annotations

from ._pipeline.servers.outside_server import OutsideServer, Probe, RunningServer, http_ready, tcp_ready

__all__ = ["OutsideServer", "Probe", "RunningServer", "http_ready", "tcp_ready"]
