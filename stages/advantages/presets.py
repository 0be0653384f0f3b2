"""Rules of the trainer libraries where they differ from each other and from us: ε, groups of one, masked sequences.

Taken from the sources of verl 0.9.1, SkyRL 0.4.0, TRL 1.16.0 and ROLL (main of 2026), and compared with the results of
the first three. σ has ddof = 1 in all of them. A preset gives their numbers in float64: the noise of their float32 sums
(in verl seven rewards of 1/3 have advantages of 0.03) is left out, and where they raise or return NaN it gives 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from .formulas import EPSILON, Mode
from .returns import Observations

Library: TypeAlias = Literal["verl", "skyrl", "trl", "roll"]
"""A library whose results can be computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The computation of advantages by one library."""

    modes: tuple[Mode, ...]
    """Modes of the library."""
    epsilon: float = EPSILON
    """Added to σ where rewards are divided by it."""
    mean_epsilon: float | None = None
    """Added to μ in maxrl, where rewards are divided by it; None divides by μ itself, and gives 0 where μ <= 0."""
    white_epsilon: float = 0.0
    """Added to σ where advantages are whitened."""
    white_epsilon_of_variance: float = 1e-8
    """Added to σ² where advantages are whitened."""
    separates_noise: bool = False
    """True if rewards that differ by no more than their noise count as equal."""
    least_deviation: float = 0.0
    """With a σ up to this value, the advantages are 0."""
    masked_count: bool = True
    """True if sequences without a token that trains enter the statistics, and tokens that do not train the reward of
    their sequence; and whether groups of equal rewards enter those of reinforce++-baseline."""
    modes_keeping_lone_rewards: tuple[Mode, ...] = ()
    """Modes that give a group of one μ = 0 and σ = 1, so that its advantage is its reward."""
    returns: Observations
    """Treatment of tokens that do not train, in reinforce++."""
    gae: Observations
    """Treatment of tokens that do not train, in gae."""
    gae_is_whitened: bool = True
    """True if gae always whitens."""
    gdpo_is_whitened_by_token: bool = False
    """True if gdpo counts each sequence in the statistics of the batch once for each token that trains."""
    batch_deviation_only: bool = False
    """True if mode batch takes μ over the group, and only σ over the batch."""


OURS = Preset(
    modes=get_args(Mode),
    white_epsilon=EPSILON,
    white_epsilon_of_variance=0.0,
    separates_noise=True,
    masked_count=False,
    returns="skipped",
    gae="skipped",
    gae_is_whitened=False,
)
"""The default."""

PRESETS: dict[Library, Preset] = {
    "verl": Preset(
        modes=("gdpo", "grpo", "dr_grpo", "rloo", "opo", "reinforce++", "reinforce++-baseline", "gae"),
        modes_keeping_lone_rewards=("gdpo", "grpo", "dr_grpo", "rloo", "opo", "reinforce++-baseline"),
        returns="skipped",
        gae="skipped",
        gdpo_is_whitened_by_token=True,
    ),
    "skyrl": Preset(
        modes=("grpo", "dr_grpo", "rloo", "maxrl", "reinforce++", "gae"),
        mean_epsilon=1e-6,
        modes_keeping_lone_rewards=("grpo", "dr_grpo", "maxrl"),
        returns="severing",
        gae="counted",
    ),
    "trl": Preset(
        modes=("gdpo", "grpo", "dr_grpo", "rloo", "batch"),
        epsilon=1e-4,
        white_epsilon=1e-4,
        white_epsilon_of_variance=0.0,
        returns="skipped",
        gae="skipped",
        batch_deviation_only=True,
    ),
    "roll": Preset(
        modes=("grpo", "dr_grpo", "batch", "reinforce++", "reinforce++-baseline", "gae"),
        least_deviation=1e-6,
        returns="blank",
        gae="valued",
        gae_is_whitened=False,
    ),
}
"""By library."""
