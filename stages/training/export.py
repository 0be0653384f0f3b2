"""Export: a folder that transformers and vLLM load, from a checkpoint of a run."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

from ..._pipeline.durability.resumption import CHECKPOINTS
from ..._pipeline.errors import InvalidConfig
from ..._pipeline.util.atomic_file import UNFINISHED
from ..._pipeline.util.checkpoint import WEIGHTS, latest_checkpoint, verify_checkpoint, write_folder
from ..._pipeline.util.manifest import MANIFEST
from ..._pipeline.util.os_errors import explaining_os_errors
from ..models.hf_model import HFModel
from ..models.model_files import ADAPTER_CONFIG
from ..models.torch_weights_file import write_weights
from ..tokenizers.end_tokens import CONFIG
from ..tokenizers.pretrained_tokenizer import copy_tokenizer
from . import torch_critic
from .torch_trainer import MOMENTS, OPTIMIZER, STATE


def export(source: str | Path, into: str | Path, *, merge: bool = True) -> Path:
    """Write the model of a checkpoint into the folder `into`, with its tokenizer, and return its path. Blocks.

    Args:
        source: a checkpoint of an `HFModel`, or the folder of a run: its latest one is taken.
        into: a new folder, or an empty one.
        merge: add adapters to the model's weights; else they stay apart, and need the model's own folder.

    Raises:
        InvalidConfig: `source` contains no such checkpoint, or `into` contains files.
        CheckpointDamaged: a file of the model is not as it was written.
        MissingExtra: the checkpoint has adapters, and transformers or peft is not installed.
        DiskFull, NotWritable, OutOfFileDescriptors: it cannot be written.
    """
    checkpoint, target = _checkpoint(Path(source)), Path(into).absolute()
    if target.exists() and any(target.iterdir()):
        raise InvalidConfig(f"{target}: expected an empty folder to write the model into, got one with files")
    verify_checkpoint(checkpoint, _is_of_model)
    write = _write_merged if merge and (checkpoint / ADAPTER_CONFIG).is_file() else _copy
    with explaining_os_errors("the exported model", target):
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}{UNFINISHED}")
        write_folder(target, unfinished, lambda into: write(checkpoint, into))
    return target


def _checkpoint(source: Path) -> Path:
    """Return the checkpoint that `source` is, or the latest in it."""
    runs = [source, source / CHECKPOINTS]
    found = next((latest for folder in runs if (latest := latest_checkpoint(folder))), source)
    if not any((found / name).is_file() for name in (CONFIG, ADAPTER_CONFIG)):
        raise InvalidConfig(
            f"{found}: expected a checkpoint of an HFModel, or the folder of a run with one, got neither {CONFIG} nor "
            f"{ADAPTER_CONFIG}"
        )
    return found


def _write_merged(checkpoint: Path, target: Path) -> None:
    model = HFModel.from_pretrained(checkpoint)
    write_weights(model.merged(), target / WEIGHTS)
    model.write_config(target)
    copy_tokenizer(checkpoint, target)


def _copy(checkpoint: Path, target: Path) -> None:
    for file in checkpoint.iterdir():
        if file.is_dir():
            shutil.copytree(file, target / file.name)
        elif _is_of_model(file.name) and file.name != MANIFEST:
            shutil.copyfile(file, target / file.name)


def _is_of_model(name: str) -> bool:
    """Return whether a file of a checkpoint belongs to the model; the others are the trainer's."""
    return name not in {MOMENTS, OPTIMIZER, STATE, torch_critic.WEIGHTS, torch_critic.MOMENTS}
