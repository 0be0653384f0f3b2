"""Damaged files of checkpoints, of exported models and of shards: the model is the same, or an error names the file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from tests.cells import cells
from tests.models_hf.test_lora import ADAM, ModelFolder, logits_of, trained
from tests.resumption.damaged_files import DAMAGE, cut, damaged_copies, empty, one_bit
from torch import Tensor

from penstock.errors import CheckpointDamaged, InvalidConfig
from penstock.models import HFModel, LoRA, export
from penstock.policies import PretrainedTokenizer
from penstock.torch import TorchTrainer

pytestmark = pytest.mark.usefixtures("one_thread")

TRAINERS = {"optimizer.pt", "optimizer.tensors", "state.json"}
"""The files of a checkpoint that a model does not need."""


@pytest.fixture(scope="module")
def checkpoints(model_folder: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of a model, of adapters and of what is exported from them, which have manifests."""
    into = tmp_path_factory.mktemp("checkpoints")
    _, adapters = trained(model_folder("qwen2"))
    whole = TorchTrainer(HFModel.from_pretrained(model_folder("qwen2")), optimizer=ADAM)
    saved = {"model": whole.save(into / "model", {}), "adapters": adapters.save(into / "adapters", {})}
    return saved | {
        "exported model": export(saved["model"], into / "exported"),
        "merged adapters": export(saved["adapters"], into / "merged"),
        "exported adapters": export(saved["adapters"], into / "apart", merge=False),
    }


def opened(folder: Path) -> Tensor:
    PretrainedTokenizer(folder)
    HFModel.empty(folder) if (folder / "config.json").exists() else None
    return logits_of(HFModel.from_pretrained(folder))


@pytest.mark.parametrize("kind", cells(DAMAGE, run=["one bit"]))
@pytest.mark.parametrize("name", ["model", "adapters", "exported model", "merged adapters", "exported adapters"])
def test_a_folder_with_a_damaged_file_is_the_same_model_or_an_error_names_the_file(
    checkpoints: dict[str, Path], name: str, kind: str, tmp_path: Path
) -> None:
    expected = opened(checkpoints[name])

    for copy, file in damaged_copies(checkpoints[name], kind, tmp_path):
        if file.name in TRAINERS or (kind, file.name) == ("absent", "manifest.json"):
            assert torch.equal(opened(copy), expected), file
            continue
        with pytest.raises(CheckpointDamaged) as refused:
            opened(copy)
        assert str(refused.value).startswith(f"{copy}: expected the files that were written, got damage: {file.name}")


@pytest.mark.parametrize("kind", cells(DAMAGE, run=["one bit", "absent"]))
@pytest.mark.parametrize("name", ["model", "adapters"])
def test_a_damaged_checkpoint_is_not_exported_and_no_trainer_resumes_from_it(
    checkpoints: dict[str, Path], model_folder: ModelFolder, name: str, kind: str, tmp_path: Path
) -> None:
    lora = LoRA(rank=4) if name == "adapters" else None
    trainer = TorchTrainer(HFModel.from_pretrained(model_folder("qwen2"), lora=lora), optimizer=ADAM)

    for copy, file in damaged_copies(checkpoints[name], kind, tmp_path):
        with pytest.raises(CheckpointDamaged) as resumed:
            trainer.resume(copy)
        assert file.name in str(resumed.value)
        if file.name not in TRAINERS:
            with pytest.raises((CheckpointDamaged, InvalidConfig)) as refused:
                export(copy, tmp_path / "exported")
            assert file.name in str(refused.value)
            assert not (tmp_path / "exported").exists()


def test_an_exported_model_that_is_changed_on_purpose_is_read_without_its_manifest(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(checkpoints["exported model"], tmp_path / "model")
    (copy / "chat_template.jinja").write_text("{{ messages }}")

    with pytest.raises(
        CheckpointDamaged, match=r"chat_template\.jinja .*remove manifest\.json if the file was changed"
    ):
        PretrainedTokenizer(copy)
    (copy / "manifest.json").unlink()

    assert PretrainedTokenizer(copy).chat_template == "{{ messages }}"


@pytest.fixture(scope="module")
def sharded(model_folder: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model that transformers has written in shards."""
    folder = tmp_path_factory.mktemp("sharded") / "model"
    transformers.AutoModelForCausalLM.from_pretrained(model_folder("qwen2")).save_pretrained(
        folder, max_shard_size="40KB"
    )
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.mark.parametrize("damage", [empty, cut, Path.unlink])
def test_a_damaged_shard_of_another_program_is_named(
    sharded: Path, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    expected = logits_of(HFModel.from_pretrained(sharded))

    for number, file in enumerate([*sharded.glob("*.safetensors"), sharded / "model.safetensors.index.json"]):
        copy = shutil.copytree(sharded, tmp_path / f"{number}")
        damage(copy / file.name)
        with pytest.raises(InvalidConfig, match=file.name):
            HFModel.from_pretrained(copy)

    assert torch.equal(logits_of(HFModel.from_pretrained(sharded)), expected)


def test_a_checkpoint_of_a_sharded_model_has_its_weights_in_one_file_with_a_hash(sharded: Path, tmp_path: Path) -> None:
    trainer = TorchTrainer(HFModel.from_pretrained(sharded), optimizer=ADAM)
    checkpoint = trainer.save(tmp_path, {})

    assert [path.name for path in checkpoint.glob("*.safetensors*")] == ["model.safetensors"]
    one_bit(checkpoint / "model.safetensors")
    with pytest.raises(CheckpointDamaged, match=r"model\.safetensors was altered"):
        trainer.resume(checkpoint)
