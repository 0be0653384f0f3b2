"""Models of transformers, from a folder as it saves them, and LoRA adapters. Needs the extra `train`."""

from __future__ import annotations

from ._pipeline.util.extras import extra

with extra("train", "penstock.models"):
    from ._stages.models.hf_model import HFModel, MergedWeights
    from ._stages.models.lora_config import LoRA
    from ._stages.models.value_model import ValueModel
    from ._stages.training.export import export

__all__ = ["HFModel", "LoRA", "MergedWeights", "ValueModel", "export"]
