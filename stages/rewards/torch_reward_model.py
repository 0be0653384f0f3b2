"""A model of transformers that scores text, loaded from a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..._pipeline.errors import InvalidConfig
from ..models.transformers_import import quiet_transformers
from .reward_input import RewardInput


def load(folder: str | Path) -> LoadedRewardModel:
    """Return the reward model in `folder`.

    Raises:
        InvalidConfig: there is no model, it has more labels than one, or its folder lacks weights that it needs, as
            that of a language model does.
        MissingExtra: transformers is not installed.
    """
    if not (Path(folder) / "config.json").is_file():
        raise InvalidConfig(f"{folder}: expected a folder with a reward model, got no config.json in it")
    try:
        with quiet_transformers("RewardModel") as transformers:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model, loading = transformers.AutoModelForSequenceClassification.from_pretrained(
                folder, dtype="auto", local_files_only=True, output_loading_info=True
            )
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"{folder}: expected a model for sequence classification, got {error}") from error
    if model.config.num_labels != 1:
        raise InvalidConfig(f"{folder}: expected a reward model with one label, got {model.config.num_labels}")
    if absent := sorted(loading["missing_keys"]):
        raise InvalidConfig(f"{folder}: expected the weights of a reward model, got none for {', '.join(absent[:3])}")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id  # finds the last token of each row
    return LoadedRewardModel(model.eval().to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer)


class LoadedRewardModel:
    """The model and its tokenizer. One thread at a time uses it."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model = model
        self._tokenizer = tokenizer

    def scores(self, inputs: Sequence[RewardInput]) -> list[float]:
        """Return the score of each completion, all computed as one batch."""
        texts = [self._text(each) for each in inputs]
        encoded = self._tokenizer(
            texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        with torch.inference_mode():
            logits = self._model(**encoded.to(self._model.device)).logits
        scores: list[float] = logits[:, 0].float().tolist()
        return scores

    def _text(self, completion: RewardInput) -> str:
        prompt = completion.prompt
        if isinstance(prompt, str):
            return prompt + completion.text
        text: str = self._tokenizer.apply_chat_template([*prompt, *completion.completion], tokenize=False)
        return text
