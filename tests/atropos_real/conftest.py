"""Find Atropos and the packages that its environments need: `make test-atropos ATROPOS=<checkout>`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.atropos_real.processes import ROOT, ended, started
from tests.atropos_real.workspace import make_workspace


@pytest.fixture(scope="session")
def checkout() -> Path:
    """Return the checkout of Atropos, whose commit scripts/check_checkout.sh has checked."""
    return Path(os.environ["ATROPOS"]).resolve()


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a tokenizer and data sets."""
    os.environ["HF_HOME"] = str(tmp_path_factory.mktemp("hub"))
    return make_workspace(tmp_path_factory.mktemp("workspace"))


@pytest.fixture(scope="session")
def model(workspace: Path) -> Iterator[str]:
    """Start a scripted model, and yield its URL."""
    log = workspace / "model.log"
    process = started("-m", "tests.atropos_real.scripted_model", str(workspace / "tokenizer"), cwd=ROOT, log=log)
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    assert url, log.read_text()
    yield url
    ended(process)
