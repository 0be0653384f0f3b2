"""Prometheus: a tracker that shows the metrics of the last step at a port of this host, for Prometheus to scrape."""

from __future__ import annotations

import importlib
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from ..._schemas.numbers import whole_number
from ..accounting.sample import Sample
from ..accounting.telemetry import get_logger
from ..errors import InvalidConfig
from ..util.extras import extra
from .tracker import RunInfo

MOST_NAMES = 1024
"""Metrics that are shown: a server of Prometheus keeps each name for weeks. Names of evaluated sets come from files."""

LAST_PORT = 65_535

log = get_logger("penstock.trackers")


class Prometheus:
    """Serves `http://127.0.0.1:<port>/metrics`: a gauge for each metric of the last step, and `penstock_step`.

    A name is `penstock_` and that of the metric, with `_` in place of what Prometheus does not allow:
    `penstock_response_length_mean`. Metrics beyond the first 1,024 are left out. Other hosts reach it through a tunnel.

    Args:
        port: of the loopback address; 0 for any free one.

    Raises:
        InvalidConfig: the port is no port, or in use.
        MissingExtra: prometheus_client is not installed.
    """

    def __init__(self, port: int) -> None:
        self._given = whole_number("port", port, least=0)
        if self._given > LAST_PORT:
            raise InvalidConfig(f"port: expected at most {LAST_PORT}, got {port}")
        _check_free(self._given)
        with extra("prometheus", "Prometheus"):
            importlib.import_module("prometheus_client")
        self._served: tuple[Any, Any] | None = None
        self._gauges: dict[str, Any] = {}
        self._registry: Any = None
        self._warned = False

    def __repr__(self) -> str:
        return f"Prometheus({self._given})"

    @property
    def url(self) -> str:
        """Return the address of the metrics; "" while none is served."""
        return "" if self._served is None else f"http://127.0.0.1:{self._served[0].server_port}/metrics"

    def start(self, run: RunInfo) -> None:
        """Serve the step that the run begins with."""
        client = importlib.import_module("prometheus_client")
        self._registry, self._gauges = client.CollectorRegistry(), {}
        self._served = client.start_http_server(self._given, addr="127.0.0.1", registry=self._registry)
        self._set("step", float(run.step))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Show the metrics of a step."""
        self._set("step", float(step))
        for name, value in metrics.items():
            self._set(name, value)

    def samples(self, samples: Sequence[Sample], step: int) -> None:
        """Show no text."""

    def close(self, ok: bool) -> None:  # noqa: ARG002, FBT001 (the protocol's)
        """End the server."""
        if self._served is not None:
            server, thread = self._served
            self._served = None
            server.shutdown()
            server.server_close()
            thread.join()

    def _set(self, metric: str, value: float) -> None:
        name = f"penstock_{re.sub('[^a-zA-Z0-9_]', '_', metric)}"
        if name not in self._gauges:
            if len(self._gauges) >= MOST_NAMES:
                self._leave_out(name)
                return
            gauge = importlib.import_module("prometheus_client").Gauge
            self._gauges[name] = gauge(name, f"{metric} of the last step", registry=self._registry)
        self._gauges[name].set(value)

    def _leave_out(self, name: str) -> None:
        """Warn once of metrics that are not shown."""
        if not self._warned:
            self._warned = True
            log.warning("metrics_not_shown", first=name, most=MOST_NAMES)


def _check_free(port: int) -> None:
    """Check that a server can listen at the port. Blocks for no time."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise InvalidConfig(f"port: expected a free port of 127.0.0.1, got {port}: {error.strerror}") from error
