"""The denominator of a mean over sequences, compared with code of other libraries, on batches with masked rows.

The lines are of the published wheels of verl 0.9.1, SkyRL 0.3.0 and TRL 1.16.0. Each is given what the tokens cost as a
rectangle [B, L], and its mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.stages.losses.scoring import part_of, scored
from torch import Tensor

from penstock.errors import InvalidRecord
from penstock.losses import AdvantageWeighted, Loss, PPOClip, Scored

LENGTHS = (3, 0, 5, 1, 0, 2)
"""Tokens that train; two of six sequences are masked wholly."""
LONGEST = 7
PROMPTS = ((0, 3), (3, 5), (5, 6))
"""The sequences of each prompt; something trains for each."""


def verl(costs: Tensor, mask: Tensor, *, norm: bool = False, token_mean: bool = False) -> float:
    """verl/trainer/ppo/core_algos.py:1182-1188, :1193 and :1195-1202, `agg_loss`.

    seq_losses = torch.sum(loss_mat * loss_mask, dim=-1)  # token-sum
    seq_mask = (torch.sum(loss_mask, dim=-1) > 0).float()  # exclude fully masked sequences
    …
    global_batch_size = seq_mask.sum()
    loss = verl_F.masked_sum(seq_losses, seq_mask) / global_batch_size * dp_size  # seq-mean
    …
    loss /= loss_scale_factor
    …
    seq_mask = torch.sum(loss_mask, dim=-1)  # per-sequence token count
    seq_losses = torch.sum(loss_mat * loss_mask, dim=-1) / (seq_mask + 1e-8)  # token-mean
    """
    seq_losses = torch.sum(costs * mask, dim=-1)
    if token_mean:
        seq_losses = seq_losses / (torch.sum(mask, dim=-1) + 1e-8)
    seq_mask = (torch.sum(mask, dim=-1) > 0).double()
    loss = (seq_losses * seq_mask).sum() / seq_mask.sum()
    return float(loss / LONGEST if norm else loss)


def skyrl_sequence_mean(costs: Tensor, mask: Tensor) -> float:
    """skyrl/backends/skyrl_train/utils/ppo_utils.py:1119, :1142 and :1092, where costs are −A · something.

    batch_size = advantages.shape[0]
    …
    normalized_advantages = advantages / (batch_size * loss_mask.sum(dim=-1, keepdim=True).clamp(min=1))
    …
    return (loss * loss_mask).sum() if loss_mask is not None else loss.sum()
    """
    batch_size = costs.shape[0]
    return float((costs / (batch_size * mask.sum(dim=-1, keepdim=True).clamp(min=1)) * mask).sum())


def skyrl_seq_mean_token_sum_norm(costs: Tensor, mask: Tensor) -> float:
    """skyrl/backends/skyrl_train/utils/ppo_utils.py:1146.

    normalized_advantages = advantages / (batch_size * max_seq_len)
    """
    return float((costs / (costs.shape[0] * LONGEST) * mask).sum())


def skyrl_prompt_mean(costs: Tensor, mask: Tensor) -> float:
    """skyrl/backends/skyrl_train/utils/ppo_utils.py:1212-1215 and :1149, of SkyRL at a9564572eb8e.

    num_prompts = len(prompt_boundaries)
    for p_start, p_end in prompt_boundaries:
        prompt_tokens = loss_mask[p_start:p_end].sum().clamp(min=1)
        normalized_advantages[p_start:p_end] = advantages[p_start:p_end] / (num_prompts * prompt_tokens)
    …
    return (loss * loss_mask).sum() if loss_mask is not None else loss.sum()
    """
    total = 0.0
    for start, end in PROMPTS:
        prompt_tokens = mask[start:end].sum().clamp(min=1)
        total += float((costs[start:end] / (len(PROMPTS) * prompt_tokens) * mask[start:end]).sum())
    return total


def trl_grpo(costs: Tensor, mask: Tensor) -> float:
    """trl/trainer/grpo_trainer.py:3154.

    loss = ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    """
    return float(((costs * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean())


def trl_dr_grpo(costs: Tensor, mask: Tensor) -> float:
    """trl/trainer/grpo_trainer.py:3164.

    loss = (per_token_loss * mask).sum() / (per_token_loss.size(0) * self.max_completion_length)
    """
    return float((costs * mask).sum() / (costs.size(0) * LONGEST))


def trl_accumulated(costs: Tensor, mask: Tensor, *, of: Callable[[Tensor, Tensor], float], steps: int) -> float:
    """trl/trainer/grpo_trainer.py:3155-3157 and :3165-3167: micro-batches of as many rows each.

    normalizer = self.current_gradient_accumulation_steps if mode == "train" else 1.0  # no accum in eval
    loss = loss / normalizer
    """
    parts = zip(costs.chunk(steps), mask.chunk(steps), strict=True)
    return sum(of(one, other) / steps for one, other in parts)


def made(lengths: Sequence[int] = LENGTHS) -> tuple[Scored, Tensor, Tensor]:
    """Return the argument of a loss, and as rectangles the cost of each token with `AdvantageWeighted` and the mask."""
    generator = torch.Generator().manual_seed(3)
    count = sum(lengths)
    logprobs = -torch.rand(count, generator=generator, dtype=torch.float64)
    advantages = torch.rand(count, generator=generator, dtype=torch.float64) - 0.5
    mask = torch.arange(LONGEST) < torch.tensor(lengths)[:, None]
    costs = torch.full(mask.shape, 1e3, dtype=torch.float64)  # masked tokens are ignored
    costs[mask] = -advantages * logprobs
    given = scored(logprobs, advantages, lengths=list(lengths))
    if len(lengths) == len(LENGTHS):
        by_prompt = [sum(lengths[start:end]) for start, end in PROMPTS]
        group_tokens = torch.tensor(by_prompt).repeat_interleave(torch.tensor(by_prompt))
        given = replace(given, loss_groups=len(PROMPTS), group_tokens=group_tokens)
    return given, costs, mask.double()


def loss(aggregation: Any, counted: Any) -> Loss:
    longest = LONGEST if aggregation == "seq-mean-token-sum-norm" else None
    return AdvantageWeighted().aggregated(aggregation, longest=longest, counted=counted)


def of_verl(name: str) -> Callable[[Tensor, Tensor], float]:
    return lambda costs, mask: verl(costs, mask, norm=name.endswith("norm"), token_mean=name.endswith("token-mean"))


CASES: list[tuple[Loss, Callable[[Tensor, Tensor], float]]] = [
    (loss("seq-mean-token-sum", "trained"), of_verl("seq-mean-token-sum")),
    (loss("seq-mean-token-mean", "trained"), of_verl("seq-mean-token-mean")),
    (loss("seq-mean-token-sum-norm", "trained"), of_verl("seq-mean-token-sum-norm")),
    (loss("prompt-mean", "trained"), skyrl_prompt_mean),
    (loss("seq-mean-token-mean", "all"), skyrl_sequence_mean),
    (loss("seq-mean-token-sum-norm", "all"), skyrl_seq_mean_token_sum_norm),
    (loss("seq-mean-token-mean", "all"), trl_grpo),
    (loss("seq-mean-token-sum-norm", "all"), trl_dr_grpo),
]
cases = pytest.mark.parametrize(("ours", "theirs"), CASES, ids=lambda each: getattr(each, "__name__", repr(each)))


@cases
def test_a_mean_over_sequences_has_the_denominator_of_the_library(
    ours: Loss, theirs: Callable[[Tensor, Tensor], float]
) -> None:
    given, costs, mask = made()

    assert ours(given).loss.item() == pytest.approx(theirs(costs, mask), rel=1e-7)


@cases
def test_micro_batches_add_up_for_each_denominator_of_the_mean(
    ours: Loss, theirs: Callable[[Tensor, Tensor], float]
) -> None:
    given, costs, mask = made()

    parts = [part_of(given, torch.tensor(rows)) for rows in ([0, 1], [2], [3, 4, 5])]

    assert sum(ours(part).loss.item() for part in parts) == pytest.approx(theirs(costs, mask), rel=1e-7)


@pytest.mark.parametrize(
    ("aggregation", "theirs"), [("seq-mean-token-mean", trl_grpo), ("seq-mean-token-sum-norm", trl_dr_grpo)]
)
def test_it_equals_the_accumulation_of_trl(aggregation: Any, theirs: Callable[[Tensor, Tensor], float]) -> None:
    given, costs, mask = made()

    assert loss(aggregation, "all")(given).loss.item() == pytest.approx(
        trl_accumulated(costs, mask, of=theirs, steps=3), rel=1e-7
    )


def test_a_mean_over_prompts_needs_the_tokens_of_each_and_counts_prompts_that_train() -> None:
    given, _, _ = made()

    with pytest.raises(InvalidRecord, match="group_tokens: expected a column, got none: give it, as TorchTrainer does"):
        loss("prompt-mean", "trained")(replace(given, group_tokens=None))
    with pytest.raises(ValueError, match="counted: expected 'all' with a mean over sequences, got it with 'prompt-m"):
        loss("prompt-mean", "all")


def test_where_every_sequence_trains_both_counts_are_one() -> None:
    given, _, _ = made((3, 1, 2))

    for aggregation in ("seq-mean-token-sum", "seq-mean-token-mean"):
        one, other = (PPOClip(old="proximal").aggregated(aggregation, counted=c) for c in ("trained", "all"))
        assert one(given).loss.item() == other(given).loss.item()
