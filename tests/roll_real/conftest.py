"""Ray and ROLL on a CPU, and a tiny model."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from tests.trl_real.letters import write_model

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session", autouse=True)
def _ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start Ray on this host alone, whose processes find penstock and these tests."""
    folder = tmp_path_factory.mktemp("started")
    os.chdir(folder)  # ROLL writes `output/logs` where it is started
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), *sys.path])
    ray = import_module("ray")
    ray.init(address="local", num_cpus=4, namespace="roll", include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
