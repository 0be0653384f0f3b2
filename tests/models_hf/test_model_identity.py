"""A run is continued with the model and the adapters that it began with, wherever their folder is."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import msgspec
import pytest
import torch
from tests.pipeline.flow_stages import Groups

from penstock import AdvantageNormalizer, Batcher, SinkTrainer, TrajectoryGroup, each, source
from penstock.errors import RunDiffers
from penstock.losses import AdvantageWeighted
from penstock.models import HFModel, LoRA
from penstock.torch import TorchTrainer, adamw

pytestmark = pytest.mark.usefixtures("one_thread")

LORA = LoRA(rank=2, alpha=4, targets=("q_proj",))


@pytest.fixture
def model(model_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    return shutil.copytree(model_folder("qwen2"), tmp_path / "model")


async def within_vocabulary(record: TrajectoryGroup) -> TrajectoryGroup:
    return msgspec.structs.replace(record, tokens=record.tokens % 320)


def run(
    folder: Path, model: Path, lora: LoRA | None, *, steps: int, allow_changes: bool = False, lr: float = 1e-3
) -> int:
    """Train steps of a model, or continue; return their number."""
    hf = HFModel.from_pretrained(model, lora=lora)
    trainer = TorchTrainer(hf, optimizer=partial(adamw, lr=lr), loss=AdvantageWeighted())
    pipeline = (
        source(Groups(9))
        .then(each(within_vocabulary))
        .then(AdvantageNormalizer("none"))
        .then(Batcher(max_tokens=64, sequences=2))
        .sink(SinkTrainer(trainer, max_steps=steps))
    )
    anyio.run(partial(pipeline.run, folder=folder, allow_changes=allow_changes))
    return trainer.steps


def test_a_moved_model_is_the_same_one(tmp_path: Path, model: Path) -> None:
    run(tmp_path / "run", model, LORA, steps=1)

    assert run(tmp_path / "run", model.rename(tmp_path / "moved"), LORA, steps=2) == 2


@pytest.mark.parametrize(
    ("lora", "key"),
    [
        (LoRA(rank=2, alpha=8, targets=("q_proj",)), "adapters.alpha: 4 → 8"),
        (LoRA(rank=4, alpha=4, targets=("q_proj",)), "adapters.rank: 2 → 4"),
        (LoRA(rank=2, alpha=4, targets=("v_proj",)), "adapters.targets"),
        (None, "SinkTrainer.model.adapters"),
    ],
    ids=["alpha", "rank", "targets", "none"],
)
def test_other_adapters_are_refused(tmp_path: Path, model: Path, lora: LoRA | None, key: str) -> None:
    run(tmp_path / "run", model, LORA, steps=1)

    with pytest.raises(RunDiffers) as refused:
        run(tmp_path / "run", model, lora, steps=2)

    assert key in str(refused.value)


def test_another_dropout_of_adapters_is_none_of_them(tmp_path: Path, model: Path) -> None:
    run(tmp_path / "run", model, LORA, steps=1)

    assert run(tmp_path / "run", model, LoRA(rank=2, alpha=4, dropout=0.5, targets=("q_proj",)), steps=2) == 2


def test_a_script_that_changes_the_rate_trains_with_it_and_says_so(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "run", model, LORA, steps=1)

    run(tmp_path / "run", model, LORA, steps=2, lr=0.5)

    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [msgspec.json.decode(line)["lr"] for line in lines] == [1e-3, 0.5]
    assert "continued from step 1 with SinkTrainer.optimizer[0].lr: 0.001 → 0.5\n" in capsys.readouterr().err


@pytest.mark.parametrize("lora", [LORA, None], ids=["adapters", "all parameters"])
def test_another_base_of_the_same_shape_is_refused_unless_it_is_allowed(
    tmp_path: Path, model: Path, lora: LoRA | None
) -> None:
    run(tmp_path / "run", model, lora, steps=1)
    other = HFModel.from_pretrained(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1e-3)
    other.module.save_pretrained(model)

    with pytest.raises(RunDiffers, match=r"SinkTrainer\.model\.base\.weights: "):
        run(tmp_path / "run", model, lora, steps=2)
    assert run(tmp_path / "run", model, lora, steps=2, allow_changes=True) == 2


def test_another_base_in_other_files_is_refused(tmp_path: Path, model: Path) -> None:
    run(tmp_path / "run", model, LORA, steps=1)
    other = HFModel.from_pretrained(model)
    (model / "model.safetensors").unlink()
    other.module.save_pretrained(model, max_shard_size="40KB")
    assert len(list(model.glob("*.safetensors"))) > 1

    with pytest.raises(RunDiffers, match=r"SinkTrainer\.model\.base\.weights: "):
        run(tmp_path / "run", model, LORA, steps=2)


@pytest.mark.parametrize(
    "name",
    ["chat_template.jinja", "special_tokens_map.json", "added_tokens.json", "additional_chat_templates/tool_use.jinja"],
)
def test_another_tokenizer_beside_the_weights_is_refused(tmp_path: Path, model: Path, name: str) -> None:
    run(tmp_path / "run", model, LORA, steps=1)
    (model / name).parent.mkdir(exist_ok=True)
    with (model / name).open("a") as file:
        file.write("{}")

    with pytest.raises(RunDiffers, match=rf"SinkTrainer\.model\.base\.{re.escape(name.partition('/')[0])}: "):
        run(tmp_path / "run", model, LORA, steps=2)


def test_a_trainer_that_resumes_adapters_with_another_scale_says_so(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def trainer(lora: LoRA) -> TorchTrainer:
        return TorchTrainer(HFModel.from_pretrained(model, lora=lora), optimizer=partial(adamw, lr=1e-3))

    checkpoint = trainer(LORA).save(tmp_path / "checkpoints", {})

    trainer(LORA).resume(checkpoint)
    assert "adapter_scale_differs" not in caplog.text
    trainer(LoRA(rank=2, alpha=8, targets=("q_proj",))).resume(checkpoint)
    assert "adapter_scale_differs" in caplog.text
