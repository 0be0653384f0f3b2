"""Two ranks replay the experts of a mixture as a single process does; they run `script_of_mixtures`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtures")
    subprocess.run([sys.executable, "-m", "tests.ranks.script_of_mixtures", str(folder)], check=True, timeout=300)
    return folder


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_train_with_the_experts_of_the_engine_and_share_the_load_balancing_loss(kind: str, folder: Path) -> None:
    first, second = (json.loads((folder / f"{kind}-{rank}.json").read_text()) for rank in range(2))
    alone, ranked = first["metrics"]

    assert first["largest"] < 1e-5
    assert second["largest"] < 1e-5
    assert ranked == pytest.approx(alone, rel=1e-3)
    assert first["weights"] < 1e-6
