"""Prompts from files and lists, for `SourceEnv`."""

from __future__ import annotations

from ._stages.data.mixture import MixedPrompts, Mixture
from ._stages.data.prompt_dataset import PromptDataset, PromptSet
from ._stages.data.prompts import Prompt, PromptSource

__all__ = ["MixedPrompts", "Mixture", "Prompt", "PromptDataset", "PromptSet", "PromptSource"]
