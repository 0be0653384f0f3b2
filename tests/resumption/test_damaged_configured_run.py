"""`penstock run` in a folder of which a file is damaged: equal weights, or status 1 and the name of the file."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from tests.configured_run import write_run
from tests.resumption.damaged_files import DAMAGE, damaged_copies, one_bit

COMMAND = [sys.executable, "-c", "from penstock._cli.app import main; main()", "run"]

NEWEST, EARLIER = "step-00000002", "step-00000001"


def configured(folder: Path) -> Path:
    """Write a run whose schedule is synchronous, with one sampler, evaluation and a checkpoint after each step."""
    path = write_run(folder, {"samplers": 1})
    values: dict[str, Any] = yaml.safe_load(path.read_text())
    values["algorithm"] |= {"max_lag": 0, "steps": 4}
    values["data"] |= {"evaluation": 2}
    path.write_text(json.dumps(values | {"checkpoint_every": 1, "samples": {"every": 1}, "evaluation": {"every": 1}}))
    return path


def ran(config: Path, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, str(config), f"folder={folder}", *overrides]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def weights_of(folder: Path) -> dict[str, list[float]]:
    tensors = load_file(folder / "checkpoints" / "step-00000004" / "model.safetensors")
    return {name: tensor.flatten().tolist() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return configured(tmp_path_factory.mktemp("configured"))


@pytest.fixture(scope="module")
def folder(config: Path) -> Path:
    """Return the folder of a run that has done half of its steps, which no test changes."""
    folder = config.with_name("half")
    assert ran(config, folder, "algorithm.steps=2").returncode == 0
    return folder


@pytest.fixture(scope="module")
def weights(config: Path, folder: Path) -> dict[str, list[float]]:
    whole = shutil.copytree(folder, config.with_name("whole"), symlinks=True)
    assert ran(config, whole).returncode == 0
    return weights_of(whole)


@pytest.mark.long
def test_a_damaged_checkpoint_ends_the_command_with_a_sentence_and_one_argument_goes_on(
    config: Path, folder: Path, weights: dict[str, list[float]], tmp_path: Path
) -> None:
    copy = shutil.copytree(folder, tmp_path / "run", symlinks=True)
    one_bit(copy / "checkpoints" / NEWEST / "optimizer.pt")

    refused = ran(config, copy)
    skipped = ran(config, copy, "skip_damaged=true")

    assert refused.returncode == 1
    assert f"penstock: {copy}/checkpoints/{NEWEST}: expected the files that were written" in refused.stderr
    assert "optimizer.pt was altered: its hash is" in refused.stderr
    assert f"{EARLIER} before it is whole: continue from that with skip_damaged=true" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert skipped.returncode == 0, skipped.stderr
    assert weights_of(copy) == weights


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", DAMAGE)
def test_every_damaged_file_is_named_or_changes_no_weight(
    config: Path, folder: Path, weights: dict[str, list[float]], kind: str, tmp_path: Path
) -> None:
    for copy, file in damaged_copies(folder, kind, tmp_path):
        continued = ran(config, copy)

        if continued.returncode:
            assert "Traceback" not in continued.stderr, file
            assert file.name in continued.stderr
            assert file.parent.name == NEWEST, continued.stderr
        else:
            assert weights_of(copy) == weights, file
