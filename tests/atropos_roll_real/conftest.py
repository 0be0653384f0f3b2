"""Atropos' environments, their data and a model: `make test-atropos-roll ATROPOS=<checkout> ROLL=<checkout>`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.atropos_real.workspace import make_workspace
from tests.atropos_roll_real.tiny_model import write_model

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="session")
def environments() -> Path:
    """Return the environments of Atropos' checkout, whose commit scripts/check_checkout.sh has checked."""
    return Path(os.environ["ATROPOS"]) / "environments"


@pytest.fixture(scope="session", autouse=True)
def _offline(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let processes of Ray find penstock and these tests, and let none ask a hub."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), *sys.path])
    os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false"}
    os.environ["HF_HOME"] = str(tmp_path_factory.mktemp("hub"))


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with data sets, in which environments run, and `tokenizer`, a model whose tokens are bytes."""
    folder = make_workspace(tmp_path_factory.mktemp("workspace"))
    write_model(folder / "tokenizer")
    return folder
