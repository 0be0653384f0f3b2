"""Every file of a run's folder, damaged in every way: the resumed run has equal weights, or an error names the file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from tests.resumption.damaged_files import DAMAGE, damaged_copies, one_bit
from tests.resumption.small_run import BEFORE, STEPS, trained
from tests.tiny_model import TinyModel

from penstock._pipeline.util import manifest
from penstock._stages.sink.best_checkpoint import best_checkpoint
from penstock.errors import CheckpointDamaged
from penstock.torch import TorchTrainer

Weights: TypeAlias = dict[str, list[float]]

NEWEST, EARLIER = (f"step-{step:08d}" for step in (BEFORE, BEFORE - 2))

pytestmark = pytest.mark.timeout(300)  # there are many runs in each of the first tests


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that has done some of its steps. Copy it."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    trained(folder, BEFORE)
    return folder


@pytest.fixture(scope="module")
def weights(folder: Path) -> Weights:
    """Return the weights at the end of the run, if its folder is whole."""
    whole = folder.with_name("whole")
    shutil.copytree(folder, whole, symlinks=True)
    return trained(whole, STEPS)


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.long
def test_a_run_with_a_damaged_file_ends_with_the_same_weights_or_an_error_that_names_the_file(
    folder: Path, weights: Weights, kind: str, tmp_path: Path
) -> None:
    refused = set[str]()
    for copy, file in damaged_copies(folder, kind, tmp_path):
        try:
            assert trained(copy, STEPS) == weights, file
        except CheckpointDamaged as error:
            message = str(error)
        else:
            continue
        refused.add(file.as_posix())
        assert message.startswith(
            f"{copy}/checkpoints/{NEWEST}: expected the files that were written, got damage: {file.name}"
        )
        assert f"{EARLIER} before it is whole: continue from that with skip_damaged=true" in message
        assert trained(copy, STEPS, skip_damaged=True) == weights, file

    newest = {path.name for path in (folder / "checkpoints" / NEWEST).iterdir()}
    found = newest - {"manifest.json"} if kind == "absent" else newest  # one without a manifest was never completed
    assert refused == {f"checkpoints/{NEWEST}/{name}" for name in found}


def test_each_file_of_a_checkpoint_is_hashed_once_when_a_run_resumes(
    folder: Path, weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(folder, tmp_path / "run", symlinks=True)
    hashed = list[Path]()

    def counted(path: Path, sum_of: Callable[[Path], manifest.FileSum] = manifest.sum_of) -> manifest.FileSum:
        hashed.append(path)
        return sum_of(path)

    monkeypatch.setattr(manifest, "sum_of", counted)

    assert trained(copy, STEPS) == weights

    newest = copy / "checkpoints" / NEWEST
    assert sorted(path for path in hashed if path.parent == newest) == sorted(
        path for path in newest.iterdir() if path.name != manifest.MANIFEST
    )


def test_a_damaged_checkpoint_without_an_earlier_one_that_is_whole_is_an_error_in_any_case(
    folder: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(folder, tmp_path / "run", symlinks=True)
    for name in NEWEST, EARLIER:
        one_bit(copy / "checkpoints" / name / "model.safetensors")

    for skip_damaged in False, True:
        with pytest.raises(CheckpointDamaged, match=r"model\.safetensors was altered: .*: restore it from a copy"):
            trained(copy, STEPS, skip_damaged=skip_damaged)

    assert (copy / "checkpoints" / NEWEST / "model.safetensors").exists()


@pytest.mark.parametrize("left", [(), ("model.safetensors",)], ids=["empty", "partial"])
def test_a_folder_that_was_never_completed_does_not_stop_a_run(
    folder: Path, weights: Weights, tmp_path: Path, left: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    copy = shutil.copytree(folder, tmp_path / "run", symlinks=True)
    unfinished = copy / "checkpoints" / "step-00000099"
    unfinished.mkdir()
    for name in left:
        (unfinished / name).write_text("half")

    assert trained(copy, STEPS) == weights
    assert not unfinished.exists()
    assert "file_set_aside" in caplog.text
    assert "no manifest.json, which" in caplog.text


def test_a_folder_with_files_and_without_a_manifest_is_not_taken_for_a_run_that_begins(
    folder: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(folder, tmp_path / "run", symlinks=True)
    for name in NEWEST, EARLIER:
        (copy / "checkpoints" / name / "manifest.json").unlink()

    with pytest.raises(CheckpointDamaged, match=rf"{NEWEST}: expected .*: no manifest\.json"):
        trained(copy, STEPS)


def test_a_trainer_stays_as_it_is_if_the_checkpoint_is_damaged(folder: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(folder / "checkpoints" / NEWEST, tmp_path / NEWEST)
    one_bit(checkpoint / "optimizer.pt")
    trainer = TorchTrainer(TinyModel(vocabulary=11), optimizer=torch.optim.AdamW)

    with pytest.raises(CheckpointDamaged, match=r"optimizer\.pt was altered: its hash is \w+ instead of \w+"):
        trainer.resume(checkpoint)

    assert trainer.steps == 0
    assert all(map(torch.equal, trainer.weights().values(), TinyModel(vocabulary=11).state_dict().values()))


def test_after_a_step_back_the_best_checkpoint_is_one_that_exists(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "run", symlinks=True)
    one_bit(copy / "checkpoints" / NEWEST / "model.safetensors")

    trained(copy, BEFORE, skip_damaged=True)

    best = best_checkpoint(copy / "checkpoints")
    assert best is not None
    assert best.evaluated == BEFORE
    assert (copy / "checkpoints" / "best" / "manifest.json").is_file()
