"""Prompts from files and lists, for `SourceEnv`."""

from __future__ import annotations

from ._stages.contracts.prompts import Prompt, PromptSource
from ._stages.data.mixture import MixedPrompts, Mixture
from ._stages.data.prompt_dataset import PromptDataset, PromptSet

__all__ = ["MixedPrompts", "Mixture", "Prompt", "PromptDataset", "PromptSet", "PromptSource"]
