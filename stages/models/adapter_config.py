"""Adapters as peft describes them in `adapter_config.json`. A field that changes their output is read, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..._pipeline.errors import InvalidConfig
from ..._pipeline.util.extras import extra
from ..tokenizers.json_object import json_object
from .lora_config import LoRA
from .model_files import ADAPTER_CONFIG

READ = {"r", "lora_alpha", "lora_dropout", "target_modules", "base_model_name_or_path", "peft_type"}

ABOUT_THE_FILE = {"peft_version", "auto_mapping", "revision", "inference_mode", "task_type"}

BY_LAYER = {"fan_in_fan_out", "layers_pattern", "megatron_core", "ensure_weight_tying"}
"""Fields without effect here: peft sets the first by the kind of each layer, the others belong to fields that are
refused."""

UNCHANGED_BASE = (True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that begin the adapters alone; others, such as pissa, change the model's weights."""


def lora_of(folder: Path) -> tuple[LoRA, Path]:
    """Return the adapters that `adapter_config.json` in `folder` describes, and the folder of their model.

    Raises:
        InvalidConfig: they compute something else than a `LoRA`; the message has the field.
        MissingExtra: peft is not installed.
    """
    path = folder / ADAPTER_CONFIG
    found = json_object(path)
    _check_fields(path, found)
    targets = found["target_modules"]
    lora = LoRA(
        rank=found["r"],
        alpha=found["lora_alpha"],
        dropout=found.get("lora_dropout", 0.0),
        targets=targets if isinstance(targets, str) else tuple(sorted(targets)),
    )
    return lora, Path(found["base_model_name_or_path"])


def _check_fields(path: Path, found: Mapping[str, Any]) -> None:
    if (kind := found.get("peft_type")) != "LORA":
        raise InvalidConfig(
            f"{path}: peft_type: expected LORA, got {kind!r}: merge the adapters into their model by peft"
        )
    for name in ("r", "lora_alpha", "target_modules", "base_model_name_or_path"):
        if not found.get(name):
            raise InvalidConfig(f"{path}: {name}: expected a value, got {found.get(name)!r}: save the adapters again")
    with extra("train", "LoRA"):
        import peft  # noqa: PLC0415 (a model without adapters does not need it)
    plain: dict[str, Any] = peft.LoraConfig().to_dict()  # type: ignore[no-untyped-call]
    for name in sorted(found.keys() - READ - ABOUT_THE_FILE - BY_LAYER):
        allowed = UNCHANGED_BASE if name == "init_lora_weights" else (plain.get(name),)
        if not _among(found[name], allowed):
            raise InvalidConfig(
                f"{path}: {name}: expected {allowed[0]!r}, got {found[name]!r}, with which adapters compute something "
                f"else than a LoRA of penstock: merge them into their model by peft (merge_and_unload)"
            )


def _among(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Return whether `value` is one of `allowed`; 1 is not True, and every empty value is like another one."""
    return any((not value and not each) or (value == each and type(value) is type(each)) for each in allowed)
