"""TorchTeacher: a torch model in this process as a teacher. What is asked while it scores is scored together next.

Knows the model only by `CausalModel`, and no stage.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..._pipeline.context import Worker
from ..._schemas.numbers import normalize_counts
from ..teacher import TeacherEngine
from ..training.causal_model import CausalModel
from ..training.scoring import Likelihood, Packed, scored_tokens
from .candidates import TeacherCandidates

__all__ = ["TorchTeacher"]


@dataclass(frozen=True, slots=True)
class TorchTeacher:
    """A recipe for a teacher that is a torch model. It tells log-probabilities at temperature 1."""

    make_model: Callable[[], CausalModel]
    """Makes the model with its weights, in the process where the stage runs."""
    tokenizer: Any
    """The model's tokenizer, or its `TokenizerIdentity`."""
    micro_batch_tokens: int = 16_384
    """Tokens that are scored at once, padding included."""

    def __post_init__(self) -> None:
        normalize_counts(self, "micro_batch_tokens")

    @asynccontextmanager
    async def open(self, worker: Worker) -> AsyncGenerator[TeacherEngine]:  # noqa: ARG002 (the protocol's)
        """Make the model."""
        model = await anyio.to_thread.run_sync(self.make_model)
        model.train(mode=False)
        yield _Engine(model, self.micro_batch_tokens)


@dataclass(slots=True, eq=False)
class _Question:
    tokens: NDArray[np.int32]
    wanted: NDArray[np.bool_]
    top_k: int
    answers: list[TeacherCandidates] = field(default_factory=list)
    """The answer, once there is one."""


class _Engine:
    """See `TeacherEngine`. Whoever finds the model free has it score everything that is asked at that moment."""

    def __init__(self, model: CausalModel, micro_batch_tokens: int) -> None:
        self._model = model
        self._micro_batch_tokens = micro_batch_tokens
        self._asked: list[_Question] = []
        """Without an answer."""
        self._free = anyio.Lock()

    async def candidates(self, tokens: NDArray[np.int32], wanted: NDArray[np.bool_], top_k: int) -> TeacherCandidates:
        """See `TeacherEngine`."""
        question = _Question(tokens, wanted, top_k)
        self._asked.append(question)
        try:
            async with self._free:
                if not question.answers:
                    await anyio.to_thread.run_sync(self._answer, list(self._asked))
        finally:
            self._asked.remove(question)
        return question.answers[0]

    @torch.inference_mode()
    def _answer(self, asked: list[_Question]) -> None:
        """Answer all of `asked` that have no answer yet."""
        questions = [question for question in asked if not question.answers]
        lengths = np.array([len(question.tokens) for question in questions])
        packed = Packed.of([q.tokens for q in questions], [q.wanted for q in questions], lengths)
        width = 1 + max(question.top_k for question in questions)
        ids = np.full((len(packed.tokens), width), -1, np.int32)
        logprobs = np.zeros(ids.shape, np.float32)
        for places, targets, likelihood in scored_tokens(self._model, packed, self._micro_batch_tokens):
            found = _likeliest(likelihood, targets, width - 1)
            at = places[:, None], np.arange(found.ids.shape[1])
            ids[at], logprobs[at] = found.ids.cpu().numpy(), found.logprobs.float().cpu().numpy()
        for question, first, last in zip(questions, packed.cu_seqlens, packed.cu_seqlens[1:], strict=False):
            known = ids[first:last] >= 0
            question.answers.append(
                TeacherCandidates(known.sum(1), ids[first:last][known], logprobs[first:last][known])
            )


class _Likeliest(NamedTuple):
    ids: Tensor
    """[T, K] −1 where there is none."""
    logprobs: Tensor
    """[T, K]."""


def _likeliest(found: Likelihood, targets: Tensor, top_k: int) -> _Likeliest:
    """The likeliest `top_k` tokens, and in the first column the token itself where it is none of them."""
    likeliest = found.predicted.topk(min(top_k, found.predicted.shape[1]))
    among = (likeliest.indices == targets[:, None]).any(-1)
    return _Likeliest(
        torch.cat([targets.masked_fill(among, -1)[:, None], likeliest.indices], -1),
        torch.cat([found.logprobs[:, None], likeliest.values], -1),
    )
