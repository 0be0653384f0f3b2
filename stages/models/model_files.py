"""The files of a model's folder: a damaged one is named before transformers reads it.

1. A checkpoint and an exported model have a manifest: the files of the model are compared with it.
2. Files of other programs have no hash. Their weights must have the length that their headers state, and every shard
   of the index must be there.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..._pipeline.errors import InvalidConfig
from ..._pipeline.util.checkpoint import WEIGHTS, verify_if_listed
from ..tokenizers.end_tokens import CONFIG, GENERATION
from ..tokenizers.json_object import json_object

ADAPTER_CONFIG = "adapter_config.json"

CONFIGURATIONS = {CONFIG, GENERATION, ADAPTER_CONFIG}

INDEX = "model.safetensors.index.json"
"""The file with the name of the shard of each tensor, if there are several."""

SHARDS = "model-*-of-*.safetensors"


def check_configurations(folder: Path) -> None:
    """Compare the configurations in `folder` with the manifest, if there is one. Blocks.

    Raises:
        CheckpointDamaged: one is not as it was written.
    """
    verify_if_listed(folder, lambda name: name in CONFIGURATIONS)


def check_model_files(folder: Path) -> None:
    """Check the configurations and the weights in `folder`. Blocks.

    Raises:
        CheckpointDamaged: one is not as it was written.
        InvalidConfig: one of another program is absent, or empty, or cut off.
    """
    if not verify_if_listed(folder, lambda name: name in CONFIGURATIONS or name.endswith(".safetensors")):
        for path in _weights_files(folder):
            _check_length(path)


def _weights_files(folder: Path) -> list[Path]:
    """Return the files that transformers reads, those that the index names if there is no whole one."""
    shards = list(folder.glob(SHARDS))
    if (folder / WEIGHTS).is_file() or not (shards or (folder / INDEX).is_file()):
        return list(folder.glob("*.safetensors"))
    if not (folder / INDEX).is_file():
        raise InvalidConfig(f"{folder / INDEX}: expected the index of {len(shards)} shards, got no such file")
    return sorted({folder / str(name) for name in json_object(folder / INDEX).get("weight_map", {}).values()})


def _check_length(path: Path) -> None:
    try:
        with safe_open(path, framework="pt"):
            pass
    except (OSError, SafetensorError) as error:
        raise InvalidConfig(f"{path}: expected weights that can be read, got {error}: save the model again") from error
