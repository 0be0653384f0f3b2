"""The tracker for Prometheus: its page is read by tests/trackers_real/against_trackers.py too."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.request import urlopen

import pytest

from penstock.errors import InvalidConfig
from penstock.trackers import Prometheus, RunInfo


def test_a_port_that_is_in_use_is_named_before_the_run() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        with pytest.raises(
            InvalidConfig, match=f"expected a free port of 127.0.0.1, got {port}: Address already in use"
        ):
            Prometheus(port)


def test_a_number_that_is_no_port_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="port: expected at most 65535, got 65536"):
        Prometheus(65_536)


def test_the_last_step_is_served_until_the_run_ends(tmp_path: Path) -> None:
    tracker = Prometheus(0)
    tracker.start(RunInfo(name="run", folder=tmp_path, step=3))
    tracker.log({"response_length/mean": 2.5}, 4)

    with urlopen(tracker.url) as page:  # noqa: S310 (our own)
        lines = page.read().decode().splitlines()
    tracker.close(True)

    assert {"penstock_step 4.0", "penstock_response_length_mean 2.5"} <= set(lines)
    assert tracker.url == ""
