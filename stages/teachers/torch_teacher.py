"""TorchTeacher: a torch model in this process as a teacher. Concurrent requests are scored together.

Knows the model only by `CausalModel`, and no stage.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..._pipeline.graph.context import Worker
from ..._pipeline.util.user_code import call_user
from ..._schemas.numbers import normalize_counts
from ..contracts.candidates import TeacherCandidates
from ..contracts.causal_model import CausalModel
from ..losses.distributions import Distributions, logprobs_of
from ..models.micro_batches import Packed
from ..models.scoring import scored_tokens
from .teacher import TeacherEngine


@dataclass(frozen=True, slots=True)
class TorchTeacher:
    """A picklable description of a teacher that is a torch model, with log-probabilities at temperature 1."""

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
        """Make the model, and yield its engine."""
        model = await anyio.to_thread.run_sync(call_user, self.make_model)
        model.train(mode=False)
        yield _TorchTeacherEngine(model, self.micro_batch_tokens)


@dataclass(slots=True, eq=False)
class _Request:
    tokens: NDArray[np.int32]
    wanted: NDArray[np.bool_]
    top_k: int
    candidates: TeacherCandidates | None = None
    """The result, once there is one."""


class _TorchTeacherEngine:
    """See `TeacherEngine`. The task that acquires the model scores all pending requests."""

    def __init__(self, model: CausalModel, micro_batch_tokens: int) -> None:
        self._model = model
        self._micro_batch_tokens = micro_batch_tokens
        self._pending: list[_Request] = []
        """Requests without a result."""
        self._free = anyio.Lock()

    async def candidates(self, tokens: NDArray[np.int32], wanted: NDArray[np.bool_], top_k: int) -> TeacherCandidates:
        """Return candidates; see `TeacherEngine.candidates`."""
        request = _Request(tokens, wanted, top_k)
        self._pending.append(request)
        try:
            async with self._free:
                if request.candidates is None:
                    await anyio.to_thread.run_sync(self._score, list(self._pending))
        finally:
            self._pending.remove(request)
        assert request.candidates is not None  # noqa: S101 (set by `_score`, of this task or another)
        return request.candidates

    @torch.inference_mode()
    def _score(self, pending: list[_Request]) -> None:
        """Score all of `pending` that have no result yet."""
        requests = [request for request in pending if request.candidates is None]
        lengths = np.array([len(request.tokens) for request in requests])
        packed = Packed.of([request.tokens for request in requests], [request.wanted for request in requests], lengths)
        width = 1 + max(request.top_k for request in requests)
        ids = np.full((len(packed.tokens), width), -1, np.int32)
        logprobs = np.zeros(ids.shape, np.float32)
        use = partial(_likeliest, top_k=width - 1)
        for places, (found, likely) in scored_tokens(self._model, packed, self._micro_batch_tokens, use):
            at = places[:, None], np.arange(found.shape[1])
            ids[at], logprobs[at] = found.cpu().numpy(), likely.float().cpu().numpy()
        for request, first, last in zip(requests, packed.cu_seqlens, packed.cu_seqlens[1:], strict=False):
            known = ids[first:last] >= 0
            request.candidates = TeacherCandidates(known.sum(1), ids[first:last][known], logprobs[first:last][known])


def _likeliest(distributions: Distributions, targets: Tensor, *, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the likeliest `top_k` tokens, with the token itself in the first column if it is none of them.

    Returns:
        Ids and log-probabilities, [T, K] each; −1 without an id.
    """
    count = min(top_k, distributions.vocabulary)
    found = [(chunk.topk(count), logprobs_of(chunk, own)) for chunk, own in distributions.chunks(targets)]
    ids, logprobs = (torch.cat([each[place] for each, _ in found]) for place in (1, 0))
    among = (ids == targets[:, None]).any(-1)
    own_logprobs = torch.cat([own for _, own in found])
    return (
        torch.cat([targets.masked_fill(among, -1)[:, None], ids], -1),
        torch.cat([own_logprobs[:, None], logprobs], -1),
    )
