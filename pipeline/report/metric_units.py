"""The meaning and the unit of metrics, by the beginning of their names, and the groups in which a page shows them."""

from __future__ import annotations

from collections.abc import Collection

import msgspec


class Unit(msgspec.Struct, frozen=True):
    """The meaning of a metric."""

    group: str
    unit: str
    """Of the vertical axis."""
    meaning: str = ""
    main: bool = False
    """True for a metric that is shown first."""


KNOWN: dict[str, Unit] = {
    "reward": Unit("reward", "reward", "mean over the rollouts of a step", main=True),
    "reward/": Unit("reward", "reward", "mean over the rollouts of a data set"),
    "rewards/": Unit("reward", "reward", "mean of a part of the reward"),
    "reward_std": Unit("reward", "reward", "mean over prompts of the deviation among their completions"),
    "frac_reward_zero_std": Unit("reward", "share of prompts", "prompts whose completions were scored alike"),
    "rollout/reward": Unit("rollout", "reward", "mean over all that was sampled, dropped or not", main=True),
    "rollout/response_length": Unit("rollout", "tokens", "sampled tokens of a rollout"),
    "rollout/prompt_length": Unit("rollout", "tokens"),
    "rollout/cut_ratio": Unit("rollout", "share", "rollouts that were cut at their longest length"),
    "rollout/tokens": Unit("rollout", "tokens", "sampled between two steps"),
    "rollout/trajectories": Unit("rollout", "trajectories", "sampled between two steps"),
    "rollout/": Unit("rollout", ""),
    "accuracy": Unit("reward", "share", "accuracy that the trainer states", main=True),
    "eval/step": Unit("evaluation", "step", "step whose weights were evaluated"),
    "eval/": Unit("evaluation", ""),
    "response_length/mean": Unit("length", "tokens", "mean of the tokens that train of a rollout", main=True),
    "response_length/clip_ratio": Unit("length", "share", "rollouts that were cut at their longest length"),
    "response_length/": Unit("length", "tokens", "tokens that train of a rollout"),
    "prompt_length/": Unit("length", "tokens"),
    "staleness/": Unit("lag", "optimizer steps", "lag of the oldest weights that sampled a rollout"),
    "advantages/": Unit("advantages", "advantage", "over the tokens that train"),
    "batch/": Unit("batch", ""),
    "ledger/": Unit("ledger", "trajectories", "since the step before"),
    "ledger/in_flight": Unit("ledger", "trajectories", "begun and not ended"),
    "ended/": Unit("ledger", "trajectories", "that ended for this reason since the step before"),
    "perf/throughput": Unit("performance", "tokens/s", "trained tokens over the time of a step"),
    "perf/total_num_tokens": Unit("performance", "tokens", "tokens of the batch, prompts included"),
    "perf/time_per_step": Unit("performance", "s", "from the end of the step before"),
    "perf/": Unit("performance", ""),
    "timing_s/": Unit("time", "s"),
    "loss": Unit("optimizer", "loss", main=True),
    "grad_norm": Unit("optimizer", "norm", "norm of the gradient before it is clipped", main=True),
    "lr": Unit("optimizer", "learning rate"),
    "entropy": Unit("policy", "nats", "mean entropy of the tokens that train", main=True),
    "kl": Unit("policy", "nats", "divergence from the policy that sampled, or from the reference", main=True),
    "kl_": Unit("policy", "nats"),
    "kl/": Unit("policy", "nats"),
    "ratio/effective_sample_size": Unit("policy", "share", "effective sample size of the importance ratios"),
    "ratio/": Unit("policy", "ratio", "probability under the trained weights over that at sampling"),
    "pg_clipfrac": Unit("policy", "share of tokens", "tokens whose ratio was clipped"),
}
"""By name, or by the beginning of names if it ends in a slash or an underscore; the longest that fits counts."""


EVALUATED = {
    "reward": Unit("evaluation", "reward", "mean reward of the set", main=True),
    "mean@": Unit("evaluation", "share", "mean accuracy of so many completions of a prompt"),
    "missing": Unit("evaluation", "prompts", "that have no result"),
    "response_length": Unit("evaluation", "tokens", "mean of the sampled tokens"),
}
"""Metrics of an evaluation, by the end of their names."""


def unit_of(name: str) -> Unit:
    """Return the meaning of a metric; one that is unknown is in the group of its first part.

    >>> unit_of("timing_s/train").unit, unit_of("mine/x").group, unit_of("mine").group
    ('s', 'mine', 'other')
    """
    if name.startswith("eval/") and (found := EVALUATED.get(name.rpartition("/")[2].rstrip("0123456789"))):
        return found
    beginnings = [key for key in KNOWN if name == key or (key[-1] in "/_" and name.startswith(key))]
    if beginnings:
        return KNOWN[max(beginnings, key=len)]
    group, slash, _ = name.partition("/")
    return unit_of(group) if slash and group in KNOWN else Unit(group if slash else "other", "")


def units_of(names: Collection[str]) -> dict[str, Unit]:
    """Return the meaning of each of `names`, in the order of `KNOWN`, those of the same key by name."""
    order = {unit: number for number, unit in enumerate(KNOWN.values())}
    found = {name: unit_of(name) for name in names}
    return dict(sorted(found.items(), key=lambda each: (order.get(each[1], len(order)), each[1].group, each[0])))
