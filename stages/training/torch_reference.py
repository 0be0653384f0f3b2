"""TorchReference: adds the log-probabilities under a reference policy, a frozen torch model.

For stages that need them before the trainer does, such as `KLReward`; the trainer can have a reference of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import anyio.to_thread
import msgspec
import numpy as np
import torch

from ..._pipeline.channels.channel import ReceiveChannel, SendChannel
from ..._pipeline.channels.chunks import receive_chunks, send_all
from ..._pipeline.graph.stage_info import StageInfo
from ..._pipeline.util.user_code import call_user
from ..._schemas import Array, TrajectoryGroup
from ..._schemas.columns import freeze
from ..._schemas.numbers import normalize_counts, normalize_numbers
from ..contracts.causal_model import CausalModel
from ..contracts.support import SUPPORT
from ..losses.distributions import Distributions
from ..models.micro_batches import Packed
from ..models.scoring import TEMPERATURE, check_temperature, own_temperatures, scored_tokens


@dataclass(frozen=True, slots=True)
class TorchReference:
    """Fill `ref_logprobs` of groups that have none, on the tokens that train; 0 elsewhere.

    Args:
        make_model: makes the model with its weights, in the process where the stage runs.
        micro_batch_tokens: tokens that are scored at once, padding included.
        temperature: temperature of the policy and the reference. A group may have its own, see TorchTrainer.

    Raises:
        InvalidConfig: a number out of range.
    """

    make_model: Callable[[], CausalModel]
    micro_batch_tokens: int = 16_384
    temperature: float = 1.0

    def __post_init__(self) -> None:
        normalize_counts(self, "micro_batch_tokens")
        normalize_numbers(self, "temperature")

    def stage_info(self) -> StageInfo:
        """State the column."""
        return StageInfo(fills_columns=("ref_logprobs",))

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        """Run the stage; see `Stage`. Groups that wait are scored together, in a worker thread.

        Raises:
            InvalidRecord: a group was sampled at another temperature.
        """
        model = await anyio.to_thread.run_sync(call_user, self.make_model)
        model.train(mode=False)
        async for groups in receive_chunks(inbox):
            bare = [group for group in groups if group.ref_logprobs is None]
            check_temperature(bare, self.temperature, "TorchReference")
            scored = iter(await anyio.to_thread.run_sync(self._scored, model, bare) if bare else ())
            filled = [next(scored) if group.ref_logprobs is None else group for group in groups]
            del groups, bare
            await send_all(outbox, filled)

    @torch.inference_mode()
    def _scored(self, model: CausalModel, groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
        packed = Packed.of(
            [group.tokens for group in groups],
            [group.loss_mask for group in groups],
            np.concatenate([group.lengths() for group in groups]),
        )
        logprobs = np.zeros(len(packed.tokens), np.float32)
        ids, lengths = [group.rollout_ids for group in groups], np.diff(packed.cu_seqlens)
        known: dict[str, Array] = {}
        if (temperatures := own_temperatures(groups, ids, lengths, self.temperature)) is not None:
            known[TEMPERATURE] = temperatures
        if supports := [group.support_ids for group in groups if group.support_ids is not None]:
            known[SUPPORT] = _side_by_side(groups, max(support.shape[1] for support in supports))
        tokens, at = self.micro_batch_tokens, self.temperature
        for places, found in scored_tokens(model, packed, tokens, Distributions.logprobs_of, temperature=at, own=known):
            logprobs[places] = found.float().cpu().numpy()
        freeze([logprobs])
        ends = np.cumsum([len(group.tokens) for group in groups])
        columns = np.split(logprobs, ends[:-1])
        return [msgspec.structs.replace(g, ref_logprobs=column) for g, column in zip(groups, columns, strict=True)]


def _side_by_side(groups: list[TrajectoryGroup], width: int) -> Array:
    """Return [N, width] the supports of all groups; −1 for those without."""
    found = np.full((sum(len(group.tokens) for group in groups), width), -1, np.int32)
    end = 0
    for group in groups:
        start, end = end, end + len(group.tokens)
        if group.support_ids is not None:
            found[start:end, : group.support_ids.shape[1]] = group.support_ids
    return found
