"""The advantages of verl 0.9.1, SkyRL 0.3.0, TRL 1.16.0 and ROLL, written down from their sources as plain loops.

Nothing is shared with penstock: one float after another, row by row. A row is the response to one prompt: what follows
the prompt, with the mask of what trains; rewards of tokens are those that the library would be given, with the reward
of the sequence already on its last token.

Each function quotes the lines that it copies. `verl`, `skyrl` and `trl` are files of the published wheels:

    verl    verl/trainer/ppo/core_algos.py, and verl/utils/torch_functional.py      of verl-0.9.1
    skyrl   skyrl/backends/skyrl_train/utils/ppo_utils.py                           of skyrl-0.3.0
    trl     trl/trainer/grpo_trainer.py, and trl/trainer/rloo_trainer.py            of trl-1.16.0
    roll    roll/utils/functionals.py, and roll/pipeline/agentic/utils.py           of alibaba/ROLL at 8eb27cc2dc34
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

__all__ = ["FORMULAS", "Row", "trl_gdpo", "verl_gdpo"]

Advantages = list[list[float]]


@dataclass(frozen=True)
class Row:
    group: int
    mask: list[int]
    rewards: list[float]
    values: list[float]
    parts: tuple[float, ...] = ()
    """The value of each reward function, in the order of their weights."""

    @property
    def score(self) -> float:
        return sum(self.rewards)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """With Bessel's correction, as `torch.std` has it."""
    m = mean(values)
    return math.sqrt(sum((x - m) ** 2 for x in values) / (len(values) - 1))


def scores_beside(rows: Sequence[Row], row: Row) -> list[float]:
    return [other.score for other in rows if other.group == row.group]


def broadcast(rows: Sequence[Row], per_row: Callable[[Row], float]) -> Advantages:
    return [[per_row(row) * trains for trains in row.mask] for row in rows]


def masked_whiten(rows: Sequence[Row], tokens: Advantages) -> Advantages:
    """(x − m) / √(variance + 1e-8) over the tokens that train.

    verl torch_functional.py:342-343, skyrl ppo_utils.py:148-149, roll functionals.py:364-371:
        whitened = (values - mean) * torch.rsqrt(var + 1e-8)
    """
    kept = [x for row, xs in zip(rows, tokens, strict=True) for x, trains in zip(xs, row.mask, strict=True) if trains]
    m, scale = mean(kept), math.sqrt(deviation(kept) ** 2 + 1e-8)
    return [
        [(x - m) / scale * trains for x, trains in zip(xs, row.mask, strict=True)]
        for row, xs in zip(rows, tokens, strict=True)
    ]


# -- against the group -----------------------------------------------------------------------------------------------


def grpo(rows: Sequence[Row], *, epsilon: float, scaled: bool = True, lone_keeps: bool = True) -> Advantages:
    """(R − μ) / (σ + ε); of a group of one, R / (1 + ε) where it keeps its reward, else 0.

    verl core_algos.py:315-328, skyrl ppo_utils.py:1321-1333:
        if len(id2score[idx]) == 1:
            id2mean[idx] = torch.tensor(0.0)
            id2std[idx] = torch.tensor(1.0)
        …
        scores[i] = (scores[i] - id2mean[index[i]]) / (id2std[index[i]] + epsilon)
    trl grpo_trainer.py:2769-2773 (σ is 0 in a group of one) and 2785-2787:
        advantages = rewards - mean_grouped_rewards
        if self.scale_rewards != "none":
            advantages = advantages / (std_rewards + 1e-4)
    """

    def one(row: Row) -> float:
        group = scores_beside(rows, row)
        if len(group) == 1:
            m, sigma = (0.0, 1.0) if lone_keeps else (row.score, 0.0)
        else:
            m, sigma = mean(group), deviation(group)
        return (row.score - m) / (sigma + epsilon if scaled else 1.0)

    return broadcast(rows, one)


def rloo(rows: Sequence[Row], *, lone_keeps: bool) -> Advantages:
    """R less the mean of the others.

    verl core_algos.py:630-633, which leaves a group of one as it is:
        if response_num > 1:
            scores[i] = scores[i] * response_num / (response_num - 1) - id2mean[index[i]] * response_num / (
                response_num - 1
            )
    skyrl ppo_utils.py:1243-1249 (`else: scores[i] = 0.0`), trl rloo_trainer.py:1688-1692:
        baselines = (grouped_sum - grouped_rewards) / (scorable_counts - 1)
    """

    def one(row: Row) -> float:
        others = scores_beside(rows, row)
        others.remove(row.score)
        return row.score - mean(others) if others else row.score * lone_keeps

    return broadcast(rows, one)


def opo(rows: Sequence[Row]) -> Advantages:
    """R less the mean of the group by length.

    verl core_algos.py:678-687:
        id2bsl[idx] = torch.tensor(0.0)
        …
        id2bsl[idx] = (len_tensor * score_tensor).sum() / len_tensor.sum()
        …
        scores[i] = scores[i] - id2bsl[index[i]]
    """

    def one(row: Row) -> float:
        group = [other for other in rows if other.group == row.group]
        if len(group) == 1:
            return row.score
        return row.score - sum(sum(o.mask) * o.score for o in group) / sum(sum(o.mask) for o in group)

    return broadcast(rows, one)


def skyrl_maxrl(rows: Sequence[Row]) -> Advantages:
    """(R − μ) / (μ + ε) whatever the sign of μ; a group of one keeps its reward.

    skyrl at a9564572eb8e, ppo_utils.py:1422-1425, where μ of a group of one is 0:
        if len(id2score[index[i]]) > 1:
            scores[i] = (scores[i] - id2mean[index[i]]) / (id2mean[index[i]] + epsilon)
        else:
            scores[i] = scores[i] - id2mean[index[i]]
    """

    def one(row: Row) -> float:
        group = scores_beside(rows, row)
        return row.score if len(group) == 1 else (row.score - mean(group)) / (mean(group) + 1e-6)

    return broadcast(rows, one)


def trl_batch(rows: Sequence[Row]) -> Advantages:
    """`scale_rewards="batch"`: μ of the group, σ of the batch.

    trl grpo_trainer.py:2777 and 2785-2787:
        std_rewards = nanstd(rewards).expand_as(rewards)
        …
        advantages = rewards - mean_grouped_rewards
        if self.scale_rewards != "none":
            advantages = advantages / (std_rewards + 1e-4)
    """
    sigma = deviation([row.score for row in rows])
    return broadcast(rows, lambda row: (row.score - mean(scores_beside(rows, row))) / (sigma + 1e-4))


def scaled_parts(rows: Sequence[Row], *, weights: Sequence[float], epsilon: float, lone_keeps: bool) -> list[float]:
    """Return, for each row, the weighted sum of its parts, each scaled within its group as `grpo` scales the reward.

    verl core_algos.py:452-464, trl grpo_trainer.py:2791-2796:
        normalized_score, _ = compute_grpo_outcome_advantage(token_level_rewards=score_list[i], …)
        …
        new_advantage += weights[i] * normalized_score
    """
    total = [0.0] * len(rows)
    for number, weight in enumerate(weights):
        of_part = [Row(row.group, [1], [row.parts[number]], []) for row in rows]
        for place, (scaled,) in enumerate(grpo(of_part, epsilon=epsilon, lone_keeps=lone_keeps)):
            total[place] += weight * scaled
    return total


def verl_gdpo(rows: Sequence[Row], weights: Sequence[float]) -> Advantages:
    """Whitened over tokens.

    verl core_algos.py:466:
        advantages = verl_F.masked_whiten(new_advantage, response_mask) * response_mask
    """
    total = scaled_parts(rows, weights=weights, epsilon=1e-6, lone_keeps=True)
    return masked_whiten(rows, [[x] * len(row.mask) for row, x in zip(rows, total, strict=True)])


def trl_gdpo(rows: Sequence[Row], weights: Sequence[float]) -> Advantages:
    """Whitened over sequences.

    trl grpo_trainer.py:2796-2799, `multi_objective_aggregation="normalize_then_sum"`:
        rewards = (reward_k * self.reward_weights.to(device).unsqueeze(0)).nansum(dim=1)
        …
        std_rewards = nanstd(rewards).expand_as(rewards) if rewards.numel() > 1 else torch.zeros_like(rewards)
        advantages = (rewards - torch.nanmean(rewards)) / (std_rewards + 1e-4)
    """
    total = scaled_parts(rows, weights=weights, epsilon=1e-4, lone_keeps=False)
    m, sigma = mean(total), deviation(total)
    return [[(x - m) / (sigma + 1e-4) * trains for trains in row.mask] for row, x in zip(rows, total, strict=True)]


def of_the_reward(
    gdpo: Callable[[Sequence[Row], Sequence[float]], Advantages],
) -> Callable[[Sequence[Row]], Advantages]:
    """Return the advantages with the reward as the only part."""
    return lambda rows: gdpo([replace(row, parts=(row.score,)) for row in rows], [1.0])


def roll_norm(scores: Sequence[float], score: float) -> float:
    """`agentic_reward_norm`: 0 for one score alone, and where σ is 1e-6 or less.

    roll agentic/utils.py:139-144; without a σ, `scores_float - reward_mean`:
        if scores_float.numel() > 1 and reward_std.abs() > 1e-6:
            normalized_scores = (scores_float - reward_mean) / (reward_std + 1e-6)
        else:
            normalized_scores = torch.zeros_like(scores_float)
    """
    if len(scores) == 1 or deviation(scores) <= 1e-6:
        return 0.0
    return (score - mean(scores)) / (deviation(scores) + 1e-6)


def roll_grpo(rows: Sequence[Row]) -> Advantages:
    return broadcast(rows, lambda row: roll_norm(scores_beside(rows, row), row.score))


def roll_batch(rows: Sequence[Row]) -> Advantages:
    return broadcast(rows, lambda row: roll_norm([other.score for other in rows], row.score))


# -- token by token --------------------------------------------------------------------------------------------------

GAMMA, LAMBDA = 0.9, 0.8


def verl_returns(row: Row) -> list[float]:
    """Masked tokens are skipped.

    verl core_algos.py:721-726:
        new_running_return = token_level_rewards[:, t] + gamma * running_return
        returns[:, t] = new_running_return * response_mask[:, t]
        running_return = new_running_return * response_mask[:, t] + running_return * (1 - response_mask[:, t])
    """
    returns, running = [], 0.0
    for reward, trains in zip(reversed(row.rewards), reversed(row.mask), strict=True):
        running = reward + GAMMA * running if trains else running
        returns.append(running)
    return returns[::-1]


def skyrl_returns(row: Row) -> list[float]:
    """Masked tokens reset the sum to 0.

    skyrl ppo_utils.py:1191-1194:
        running_return = token_level_rewards[:, t] + gamma * running_return
        returns[:, t] = running_return
        # Reset after EOS
        running_return = running_return * response_mask[:, t]
    """
    returns, running = [], 0.0
    for reward, trains in zip(reversed(row.rewards), reversed(row.mask), strict=True):
        running = reward + GAMMA * running
        returns.append(running)
        running *= trains
    return returns[::-1]


def roll_returns(row: Row) -> list[float]:
    """Masked tokens have reward 0 and count as steps.

    roll functionals.py:1160 (agentic/utils.py:532) and functionals.py:494-495:
        token_level_rewards = token_level_rewards * response_mask
        …
        local_reward = token_level_rewards[:, t] if t < gen_len else 0.0
        cumulative_reward = local_reward + gamma * cumulative_reward
    """
    returns, running = [], 0.0
    for reward, trains in zip(reversed(row.rewards), reversed(row.mask), strict=True):
        running = reward * trains + GAMMA * running
        returns.append(running)
    return returns[::-1]


def verl_gae(row: Row) -> list[float]:
    """Masked tokens are skipped.

    verl core_algos.py:251-256:
        delta = token_level_rewards[:, t] + gamma * nextvalues - values[:, t]
        lastgaelam_ = delta + gamma * lam * lastgaelam
        nextvalues = values[:, t] * response_mask[:, t] + (1 - response_mask[:, t]) * nextvalues
        lastgaelam = lastgaelam_ * response_mask[:, t] + (1 - response_mask[:, t]) * lastgaelam
    """
    advantages, following, running = [], 0.0, 0.0
    for reward, value, trains in zip(reversed(row.rewards), reversed(row.values), reversed(row.mask), strict=True):
        if trains:
            running = reward + GAMMA * following - value + GAMMA * LAMBDA * running
            following = value
        advantages.append(running)
    return advantages[::-1]


def plain_gae(rewards: Sequence[float], values: Sequence[float]) -> list[float]:
    """Every token of the response is a step.

    skyrl ppo_utils.py:1275-1277, roll functionals.py:530-532:
        nextvalues = values[:, t + 1] if t < gen_len - 1 else 0.0
        delta = token_level_rewards[:, t] + gamma * nextvalues - values[:, t]
        lastgaelam = delta + gamma * lambd * lastgaelam
    """
    advantages, following, running = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        running = reward + GAMMA * following - value + GAMMA * LAMBDA * running
        following = value
        advantages.append(running)
    return advantages[::-1]


def roll_gae(row: Row) -> list[float]:
    """Rewards are multiplied by the mask; of values, those that are stored, and not those of the recursion.

    roll functionals.py:1160-1167 (agentic/utils.py:532-539):
        token_level_rewards = token_level_rewards * response_mask
        …
        values = data.batch["values"].float()
        data.batch["values"] = values * response_mask
        advantages, returns = compute_gae_advantage_return(
            token_level_rewards=token_level_rewards, values=values, gamma=gamma, lambd=lambd
        )
    """
    return plain_gae([r * trains for r, trains in zip(row.rewards, row.mask, strict=True)], row.values)


def whitened(per_row: Callable[[Row], list[float]]) -> Callable[[Sequence[Row]], Advantages]:
    """verl core_algos.py:262 and 728-729, skyrl ppo_utils.py:1196-1197 and 1282, roll functionals.py:1183-1184:

    advantages = masked_whiten(returns, response_mask)
    advantages = advantages * response_mask
    """
    return lambda rows: masked_whiten(rows, [per_row(row) for row in rows])


def masked(per_row: Callable[[Row], list[float]]) -> Callable[[Sequence[Row]], Advantages]:
    """roll functionals.py:1184, without `whiten_advantages`: `advantages = advantages * response_mask`."""
    return lambda rows: [[x * trains for x, trains in zip(per_row(r), r.mask, strict=True)] for r in rows]


FORMULAS: dict[tuple[str, str], Callable[[Sequence[Row]], Advantages]] = {
    ("verl", "grpo"): lambda rows: grpo(rows, epsilon=1e-6),
    ("verl", "dr_grpo"): lambda rows: grpo(rows, epsilon=0.0, scaled=False),
    ("verl", "gdpo"): of_the_reward(verl_gdpo),
    ("verl", "rloo"): lambda rows: rloo(rows, lone_keeps=True),
    ("verl", "opo"): opo,
    ("verl", "reinforce++"): whitened(verl_returns),
    ("verl", "reinforce++-baseline"): lambda rows: masked_whiten(rows, grpo(rows, epsilon=0.0, scaled=False)),
    ("verl", "gae"): whitened(verl_gae),
    ("skyrl", "grpo"): lambda rows: grpo(rows, epsilon=1e-6),
    ("skyrl", "dr_grpo"): lambda rows: grpo(rows, epsilon=0.0, scaled=False),
    ("skyrl", "rloo"): lambda rows: rloo(rows, lone_keeps=False),
    ("skyrl", "maxrl"): skyrl_maxrl,
    ("skyrl", "reinforce++"): whitened(skyrl_returns),
    ("skyrl", "gae"): whitened(lambda row: plain_gae(row.rewards, row.values)),
    ("trl", "grpo"): lambda rows: grpo(rows, epsilon=1e-4, lone_keeps=False),
    ("trl", "dr_grpo"): lambda rows: grpo(rows, epsilon=0.0, scaled=False, lone_keeps=False),
    ("trl", "gdpo"): of_the_reward(trl_gdpo),
    ("trl", "rloo"): lambda rows: rloo(rows, lone_keeps=False),
    ("trl", "batch"): trl_batch,
    ("roll", "grpo"): roll_grpo,
    ("roll", "dr_grpo"): lambda rows: grpo(rows, epsilon=0.0, scaled=False, lone_keeps=False),
    ("roll", "batch"): roll_batch,
    ("roll", "reinforce++"): whitened(roll_returns),
    ("roll", "reinforce++-baseline"): lambda rows: masked_whiten(
        rows, grpo(rows, epsilon=0.0, scaled=False, lone_keeps=False)
    ),
    ("roll", "gae"): masked(roll_gae),
}
"""By library and mode."""
