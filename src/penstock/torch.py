"""Classes that use a torch model: trainers, policies, teachers, weights in a folder. Needs torch."""

from __future__ import annotations

from ._pipeline.util.extras import extra

with extra("torch", "penstock.torch"):
    from ._pipeline.weights.memory_folder import MemoryFolder
    from ._pipeline.weights.weight_folder import WeightFolder
    from ._stages.contracts.attention import Attention
    from ._stages.contracts.causal_model import (
        Cache,
        CausalModel,
        HasPacking,
        HasPositions,
        HasVocabulary,
        JoinableCache,
        KVCache,
        Read,
        positions_of,
    )
    from ._stages.engines.torch_policy import TorchPolicy
    from ._stages.teachers.torch_teacher import TorchTeacher
    from ._stages.training.optimizers import ReferenceUpdates, adamw
    from ._stages.training.torch_critic import Critic
    from ._stages.training.torch_ranked_trainer import RankedTrainer
    from ._stages.training.torch_reference import TorchReference
    from ._stages.training.torch_trainer import TorchTrainer

__all__ = [
    "Attention",
    "Cache",
    "CausalModel",
    "Critic",
    "HasPacking",
    "HasPositions",
    "HasVocabulary",
    "JoinableCache",
    "KVCache",
    "MemoryFolder",
    "RankedTrainer",
    "Read",
    "ReferenceUpdates",
    "TorchPolicy",
    "TorchReference",
    "TorchTeacher",
    "TorchTrainer",
    "WeightFolder",
    "adamw",
    "positions_of",
]
