"""A run on ranks that is continued with other values: applied on every rank, free, or refused before a step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module", params=["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the ranks, and return the folder of their files."""
    folder = tmp_path_factory.mktemp("changes")
    command = [sys.executable, "-m", "tests.ranks.script_of_changes", str(folder), kind]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    assert "continued from step 2 with SinkTrainer.optimizer[0].lr: 0.3 → 0.1\n" in ran.stderr
    return folder


def ended(folder: Path, kind: str, rank: int) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / f"{kind}-{rank}.json").read_text())
    return read


def assert_equal(weights: dict[str, Any], expected: dict[str, Any], *, atol: float = 0) -> None:
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(weights[name], tensor, atol=atol, rtol=0)


@pytest.mark.parametrize("part", ["applied", "free"])
@pytest.mark.long
def test_the_ranks_go_on_as_a_single_process_does_with_the_same_changes(folder: Path, kind: str, part: str) -> None:
    leader, follower = (ended(folder, kind, rank) for rank in range(2))

    assert not leader[part]["error"]
    assert leader[part]["steps"] == follower[part]["steps"] == leader[f"{part} alone"]["steps"]
    assert_equal(leader[part]["weights"], leader[f"{part} alone"]["weights"], atol=1e-5)
    assert_equal(follower[part]["weights"], leader[part]["weights"])


def test_a_refused_change_ends_all_ranks_before_a_step(folder: Path, kind: str) -> None:
    leader, follower = (ended(folder, kind, rank)["refused"] for rank in range(2))

    assert leader["error"].startswith(f"RunDiffers: expected the run in {folder / kind} as it was until step 3")
    assert "SinkTrainer.optimizer: 'SGD' → 'AdamW'" in leader["error"]
    assert follower["error"] == "PeerLost: rank 0 of 2 ended with an error: see its output"
    assert leader["steps"] == follower["steps"] == 0


def test_a_damaged_checkpoint_ends_all_ranks_before_a_step(folder: Path, kind: str) -> None:
    leader, follower = (ended(folder, kind, rank)["damaged"] for rank in range(2))

    assert leader["error"].startswith(f"CheckpointDamaged: {folder / kind}/checkpoints/step-00000003: expected")
    assert "optimizer.pt was altered" in leader["error"]
    assert follower["error"] == "PeerLost: rank 0 of 2 ended with an error: see its output"
    assert leader["steps"] == follower["steps"] == 0
