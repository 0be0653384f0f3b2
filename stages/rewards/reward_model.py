"""`RewardModel`: a model in a folder gives a number to a prompt with its completion. Describing it needs no torch."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio.to_thread

from ..._pipeline.util.extras import extra
from .reward_functions import RewardComponent
from .reward_input import RewardInput


@dataclass(frozen=True, slots=True)
class RewardModel(RewardComponent):
    """A model of transformers for sequence classification with one label. Needs the extra `train`.

    It reads the prompt and the completion as text: by the chat template in its folder if the prompt is a conversation,
    else one after the other. All completions of a group are one batch. It is loaded at the start of the run, by its own
    tokenizer, to the GPU if there is one.

    Args:
        folder: a local path.
    """

    folder: str | Path
    batched: bool = field(default=True, init=False)
    concurrency: int = field(default=1, kw_only=True)
    reward_timeout_s: float = field(default=120.0, kw_only=True)

    def default_name(self) -> str:
        """Return the name of the folder."""
        return Path(self.folder).absolute().name

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[Callable[[Sequence[RewardInput]], list[float]]]:
        """Load the model.

        Raises:
            InvalidConfig: the folder has another kind of model, or no tokenizer.
            MissingExtra: torch or transformers is not installed.
        """
        with extra("train", "RewardModel"):
            from .torch_reward_model import load  # noqa: PLC0415 (describing a model does not need torch)
        model = await anyio.to_thread.run_sync(load, self.folder)
        yield model.scores
