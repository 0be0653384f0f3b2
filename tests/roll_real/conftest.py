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


def write_chat_model(folder: Path) -> Path:
    """Write the model, with a template: ROLL's own env manager sends messages."""
    write_model(folder)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model"))


def start_ray() -> None:
    """Start Ray on this host alone."""
    options = {"include_dashboard": False, "log_to_driver": False}
    import_module("ray").init(address="local", num_cpus=4, namespace="roll", **options)


@pytest.fixture(scope="session", autouse=True)
def _ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run Ray, whose processes find penstock and these tests."""
    folder = tmp_path_factory.mktemp("started")
    os.chdir(folder)  # ROLL writes `output/logs` where it is started
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), *sys.path])
    start_ray()
    yield
    import_module("ray").shutdown()
