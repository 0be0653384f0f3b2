"""TorchReference: fills the log-probabilities under a reference policy, which a frozen torch model is.

For what needs them before the trainer does, `KLReward` above all; the trainer can have a reference of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import anyio.to_thread
import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from ..pipeline.at_hand import at_hand, send_each
from ..pipeline.channel import ReceiveChannel, SendChannel
from ..schemas import TrajectoryGroup
from ..schemas.columns import freeze
from .causal_model import CausalModel
from .micro_batches import micro_batches
from .scoring import likelihood

__all__ = ["TorchReference"]


@dataclass(frozen=True, slots=True)
class TorchReference:
    """Fill `ref_logprobs` of groups that have none, on the tokens that train; 0 elsewhere.

    Args:
        make_model: makes the model with its weights, in the process where the stage runs.
        micro_batch_tokens: tokens that are scored at once, padding included.
        temperature: at which the policy samples; the reference is taken at the same.
    """

    make_model: Callable[[], CausalModel]
    micro_batch_tokens: int = 16_384
    temperature: float = 1.0

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        """See `Stage`. Groups that are waiting are scored together, in a worker thread."""
        model = await anyio.to_thread.run_sync(self.make_model)
        model.train(mode=False)
        async for groups in at_hand(inbox):
            bare = [group for group in groups if group.ref_logprobs is None]
            scored = iter(await anyio.to_thread.run_sync(self._scored, model, bare) if bare else ())
            filled = [next(scored) if group.ref_logprobs is None else group for group in groups]
            del groups, bare
            await send_each(outbox, filled)

    @torch.inference_mode()
    def _scored(self, model: CausalModel, groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
        packed = _packed(groups)
        logprobs = np.zeros(len(packed.tokens), np.float32)
        device = next(model.parameters()).device
        places = {"place": np.arange(len(logprobs))}
        for part in micro_batches(packed, places, self.micro_batch_tokens, device):
            found = likelihood(model, part, temperature=self.temperature).logprobs
            logprobs[part.columns["place"].cpu().numpy()] = found.float().cpu().numpy()
        freeze([logprobs])
        ends = np.cumsum([len(group.tokens) for group in groups])
        columns = np.split(logprobs, ends[:-1])
        return [msgspec.structs.replace(g, ref_logprobs=column) for g, column in zip(groups, columns, strict=True)]


class _Packed(NamedTuple):
    """The sequences of several groups, one behind the other; see `Sequences`."""

    tokens: NDArray[np.int32]
    cu_seqlens: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]


def _packed(groups: list[TrajectoryGroup]) -> _Packed:
    def joined(columns: Iterable[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate(list(columns))

    lengths = joined(group.lengths() for group in groups)
    return _Packed(
        tokens=joined(group.tokens for group in groups),
        cu_seqlens=np.concatenate([np.zeros(1, np.int64), lengths.cumsum()]),
        loss_mask=joined(group.loss_mask for group in groups),
    )
