"""Clusters of Ray on this machine: several nodes on this host, and nodes that are another host to penstock."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
from tests.failsafe import FAILSAFE_S

AddNode = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture(scope="session", autouse=True)
def _settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path_factory.mktemp("ray") / "token"))
        patch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
        patch.setenv("RAY_health_check_period_ms", "500")
        patch.setenv("RAY_health_check_failure_threshold", "4")
        patch.delenv("RAY_ADDRESS", raising=False)
        yield


@pytest.fixture(scope="module")
def cluster(_settings: None) -> Iterator[Any]:
    """Two nodes of this host, each with two CPUs and one `slot`."""
    made = import_module("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"slot": 1}}
    )
    made.add_node(num_cpus=2, resources={"slot": 1})
    made.wait_for_nodes()
    try:
        yield made
    finally:
        made.shutdown()


@dataclass(frozen=True)
class OwnHead:
    """A cluster of one node, whose head a test kills."""

    cluster: Any

    @property
    def address(self) -> str:
        """The address of the head."""
        return str(self.cluster.address)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the processes of the head."""
        for name in ("gcs_server", "raylet"):
            for info in self.cluster.head_node.all_processes[name]:
                info.process.send_signal(number)


@pytest.fixture
def own_head(_settings: None) -> Iterator[OwnHead]:
    """Start a cluster of its own."""
    made = import_module("ray.cluster_utils").Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        yield OwnHead(made)
    finally:
        made.shutdown()


@pytest.fixture
def job_server(_settings: None) -> Iterator[str]:
    """Return the URL of the job server of a cluster of its own, whose processes have the paths of this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", ":".join(sys.path))
        own = free_ports("dashboard_port", "dashboard_agent_listen_port")  # another cluster uses the usual ones
        options = {"num_cpus": 2, "include_dashboard": True, **own}
        made = import_module("ray.cluster_utils").Cluster(initialize_head=True, head_node_args=options)
        try:
            url = f"http://{made.webui_url}"
            wait_for_agent(url)
            yield url
        finally:
            made.shutdown()


@pytest.fixture
def add_other_host(cluster: Any) -> Iterator[AddNode]:
    """Return a function that adds a node in a namespace of processes of its own, with a resource of the given name."""
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare")

    def add(resource: str) -> subprocess.Popen[bytes]:
        code = "from ray.scripts.scripts import main; main()"
        node = subprocess.Popen(
            [
                *("unshare", "--pid", "--fork", "--mount-proc", "--kill-child"),
                *(sys.executable, "-c", code, "start", f"--address={cluster.address}", "--num-cpus=2", "--block"),
                f'--resources={{"{resource}": 1}}',
            ],
            stdout=subprocess.DEVNULL,
        )
        stack.callback(node.wait)
        stack.callback(node.kill)
        wait_for_resource(cluster, resource)
        return node

    with ExitStack() as stack:
        yield add


def free_ports(*names: str) -> dict[str, int]:
    """Return a free port for each name."""
    with ExitStack() as stack:
        opened = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in names]
        return {name: each.getsockname()[1] for name, each in zip(names, opened, strict=True)}


def wait_for_agent(url: str) -> None:
    """Wait until the job server takes jobs."""
    client = import_module("ray.job_submission").JobSubmissionClient(url)
    deadline = time.monotonic() + FAILSAFE_S
    while True:
        try:
            client.submit_job(entrypoint="true")
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def wait_for_resource(cluster: Any, resource: str) -> None:
    """Wait until the cluster has `resource`."""
    code = f"""
import ray, sys, time
ray.init(address={cluster.address!r}, logging_level="ERROR")
deadline = time.monotonic() + {FAILSAFE_S}
while {resource!r} not in ray.cluster_resources():
    if time.monotonic() > deadline:
        sys.exit("no node with it")
    time.sleep(0.1)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": ":".join(sys.path)})
