"""Prompts from files and lists, for `SourceEnv`; and conversations to imitate."""

from __future__ import annotations

from ._stages.contracts.prompts import Prompt, PromptSource
from ._stages.data.curriculum import Curriculum
from ._stages.data.mixture import MixedPrompts, Mixture
from ._stages.data.prompt_dataset import ChatRow, PromptDataset, PromptSet
from ._stages.data.success_rates import SuccessRates
from ._stages.sampling.demonstrations import Demonstrations

__all__ = [
    "ChatRow",
    "Curriculum",
    "Demonstrations",
    "MixedPrompts",
    "Mixture",
    "Prompt",
    "PromptDataset",
    "PromptSet",
    "PromptSource",
    "SuccessRates",
]
