"""A model that ranks share is never whole on one: what is published, saved and read is gathered tensor by tensor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

ROOT = Path(__file__).parent.parent.parent

MIB = 2**20

LARGEST_TENSOR = 16 * MIB

ROOM = 64 * MIB
"""Bytes that a rank may need beside the largest tensor."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run both ranks, and return the folder of their files."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.ranks.script_of_sharded_memory", str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    return folder


@pytest.fixture
def found(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return read


def files(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in sorted((folder / "step-00000001").glob("*.*tensors"))}


@pytest.mark.parametrize("what", ["publish", "save"])
def test_no_rank_needs_more_memory_than_for_the_largest_tensor(found: dict[str, Any], folder: Path, what: str) -> None:
    whole = files(folder / "ranked")["model.safetensors"].stat().st_size

    assert max(found[what]) <= LARGEST_TENSOR + ROOM < whole


def test_a_rank_that_resumes_needs_memory_for_its_part_of_the_moments_besides(
    found: dict[str, Any], folder: Path
) -> None:
    moments = files(folder / "ranked")["optimizer.tensors"].stat().st_size

    assert max(found["resume"]) <= moments / 2 + LARGEST_TENSOR + ROOM < moments


def test_what_is_published_and_saved_has_the_bytes_that_one_process_has(found: dict[str, Any], folder: Path) -> None:
    ranked, alone = files(folder / "ranked"), files(folder / "alone")

    assert found["differ"] == []
    assert [*ranked] == [*alone] == ["model.safetensors", "optimizer.tensors"]
    assert all(path.read_bytes() == alone[name].read_bytes() for name, path in ranked.items())


def test_the_moments_of_every_parameter_are_saved_under_its_number(folder: Path) -> None:
    """Tied tensors are one parameter."""
    with safe_open(files(folder / "ranked")["optimizer.tensors"], framework="pt") as file:
        names = sorted(file.keys())
    with safe_open(files(folder / "ranked")["model.safetensors"], framework="pt") as file:
        parameters = len(file.keys())

    assert names == sorted(f"{number}.{key}" for number in range(parameters) for key in ("exp_avg", "exp_avg_sq"))


def test_a_step_after_it_is_that_of_one_process(found: dict[str, Any]) -> None:
    ranked, alone = found["losses"]

    assert ranked == pytest.approx(alone, abs=1e-5)
