"""`penstock run` whose folder has a damaged file, or whose disk is full: equal weights, or status 1 and a name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tests.command_line import ran
from tests.configured_run import write_run
from tests.namespaces import printed_by, small_disk
from tests.resumption.damaged_files import DAMAGE, damaged_copies, one_bit

from penstock import here

NEWEST, EARLIER, LAST = "step-00000002", "step-00000001", "step-00000003"

LORA = {"rank": 2, "alpha": 4, "targets": ["q_proj", "v_proj"]}

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


def configured(folder: Path, lora: dict[str, Any] | None) -> Path:
    """Write a run whose schedule is synchronous, with one sampler, evaluation and a checkpoint after each step."""
    path = write_run(folder, {"samplers": 1})
    values: dict[str, Any] = yaml.safe_load(path.read_text())
    values["model"] |= {"lora": lora}
    values["algorithm"] |= {"max_lag": 0, "steps": 3}
    values["data"] |= {"evaluation": 2}
    path.write_text(json.dumps(values | {"checkpoint_every": 1, "samples": {"every": 1}, "evaluation": {"every": 1}}))
    return path


def arguments(config: Path, folder: Path, *overrides: str) -> list[str]:
    return ["run", str(config), f"folder={folder}", *overrides]


def ended(*given: str) -> str:
    """Run `penstock` in this process; return its error, empty if it exits with status 0.

    The sampler, which reads nothing of the folder, is in this process too: another one imports torch for seconds.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock._stages.training_run.torch_parts.RunParts._samplers", lambda *_: here())
        status, printed = ran(*given)
    return "" if status == 0 else printed.splitlines()[-1]


def weights_of(folder: Path) -> dict[str, list[float]]:
    (path,) = (folder / "checkpoints" / LAST).glob("*.safetensors")
    return {name: tensor.flatten().tolist() for name, tensor in load_file(path).items()}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=[None, LORA], ids=["model", "adapters"])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return configured(tmp_path_factory.mktemp("configured"), request.param)


@pytest.fixture(scope="module")
def folder(config: Path) -> Path:
    """Return the folder of a run that has done some of its steps, which no test changes."""
    folder = config.with_name("half")
    assert not ended(*arguments(config, folder, "algorithm.steps=2"))
    return folder


@pytest.fixture(scope="module")
def weights(config: Path, folder: Path) -> dict[str, list[float]]:
    whole = shutil.copytree(folder, config.with_name("whole"), symlinks=True)
    assert not ended(*arguments(config, whole))
    return weights_of(whole)


def test_a_damaged_checkpoint_ends_the_command_with_a_sentence_and_one_argument_goes_on(
    config: Path, folder: Path, weights: dict[str, list[float]], tmp_path: Path
) -> None:
    copy = shutil.copytree(folder, tmp_path / "run", symlinks=True)
    one_bit(copy / "checkpoints" / NEWEST / "optimizer.pt")
    command = [sys.executable, "-m", "penstock", *arguments(config, copy)]

    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    skipped = subprocess.run([*command, "skip_damaged=true"], capture_output=True, text=True, check=False)

    assert refused.returncode == 1
    assert f"penstock: {copy}/checkpoints/{NEWEST}: expected the files that were written" in refused.stderr
    assert "optimizer.pt was altered: its hash is" in refused.stderr
    assert f"{EARLIER} before it is whole: continue from that with skip_damaged=true" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert skipped.returncode == 0, skipped.stderr
    assert weights_of(copy) == weights


@pytest.mark.parametrize("kind", DAMAGE)
def test_every_damaged_file_is_named_or_changes_no_weight(
    config: Path, folder: Path, weights: dict[str, list[float]], kind: str, tmp_path: Path
) -> None:
    refused = set[str]()
    for copy, file in damaged_copies(folder, kind, tmp_path):
        if error := ended(*arguments(config, copy)):
            assert error.startswith(f"penstock: {copy}/checkpoints/{NEWEST}: expected the files that were written"), (
                file
            )
            assert file.name in error
            refused.add(file.as_posix())
        else:
            assert weights_of(copy) == weights, file

    newest = {path.name for path in (folder / "checkpoints" / NEWEST).iterdir()}
    found = newest - {"manifest.json"} if kind == "absent" else newest  # one without a manifest was never completed
    assert refused == {f"checkpoints/{NEWEST}/{name}" for name in found}


def test_a_run_that_met_a_full_disk_names_it_and_ends_with_equal_weights_when_it_has_room(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()

    printed = printed_by(
        small_disk(disk, "64m"), "-m", "tests.resumption.script_of_a_full_disk", str(disk), str(tmp_path)
    )

    full = [text for key, text in printed.items() if key.startswith("full but for ")]
    resumed = {text for key, text in printed.items() if key.startswith("resumed after ")}
    assert len(full) > 8
    assert all("expected room for" in text and f"in {disk}/run" in text for text in full)
    assert resumed == {"equal weights True"}
