"""`Evaluation`: the prompts to complete every few optimizer steps, their sampling and their scores.

A picklable value, given to `SourceEnv` (its workers evaluate) and to `SinkTrainer` (it keeps the best checkpoint).
`evaluator` carries it out. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import msgspec

from ..._pipeline.errors import InvalidConfig
from ..._schemas.config import nearest
from ..._schemas.numbers import normalize_counts, normalize_numbers
from ..contracts.sampling_params import SamplingParams
from ..rewards.reward_bridge import RewardBridge
from .environments import Environment
from .scores import ks


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Complete prompts of several sets every few optimizer steps, without training on them.

    Raises:
        InvalidConfig: a number out of range, no set, or several greedy samples.
    """

    sets: Mapping[str, Callable[[], Environment]]
    """The sets by their names in metrics: a `PromptDataset`, or a function as `SourceEnv.make_env`, of an environment
    with a length."""
    rewards: RewardBridge | None = None
    """Scores the completions; None if the environments do."""
    every: int = 20
    """Optimizer steps between two evaluations; one is also done before the first step."""
    last: int | None = None
    """The last optimizer step of the run, evaluated too; None to evaluate only multiples of `every`."""
    samples: int = 1
    """Completions of each prompt."""
    sampling: SamplingParams = SamplingParams(greedy=True)  # noqa: RUF009 (a frozen value)
    """Parameters of the completions. Without a seed it is 0, so that no random number is taken from training."""
    answer: Callable[[str], Hashable | None] = str.strip
    """Returns the answer in the text of a completion, for the majority; None for none. A module-level function."""
    best: str = ""
    """The metric that is highest at the best checkpoint; by default mean@n of the first set."""
    timeout_s: float = 3600.0
    """Bound on one evaluation; prompts that are not done by then are missing from it."""

    def __post_init__(self) -> None:
        """Check the fields."""
        normalize_counts(self, "every", "samples", "last")
        normalize_numbers(self, "timeout_s")
        if not self.sets:
            raise InvalidConfig("Evaluation.sets: expected at least one set of prompts, got none")
        if self.sampling.greedy and self.samples > 1:
            raise InvalidConfig(
                f"Evaluation.samples: expected 1 with greedy sampling, whose completions are all the same, got "
                f"{self.samples}: give sampling=SamplingParams(temperature=…)"
            )
        if not self.sampling.greedy and self.sampling.seed is None:
            object.__setattr__(self, "sampling", msgspec.structs.replace(self.sampling, seed=0))

        self._check_best()

    def _check_best(self) -> None:
        scores = [f"mean@{self.samples}", f"maj@{self.samples}", "reward", *(f"pass@{k}" for k in ks(self.samples))]
        known = [f"eval/{name}/{score}" for name in self.sets for score in scores]
        if self.best_metric not in known:
            raise InvalidConfig(
                f"Evaluation.best: expected one of {', '.join(known)}, got {self.best!r}{nearest(self.best, known)}"
            )

    @property
    def best_metric(self) -> str:
        """Return the name of the metric that is highest at the best checkpoint."""
        return self.best or f"eval/{next(iter(self.sets))}/mean@{self.samples}"

    def due(self, step: int) -> bool:
        """Return whether the weights of optimizer step `step` are evaluated."""
        return step % self.every == 0 or step == self.last

    def newest_due(self, step: int) -> int:
        """Return the last step up to `step` that is evaluated."""
        multiple = step // self.every * self.every
        return multiple if self.last is None or self.last > step else max(multiple, self.last)

    def next_due(self, step: int) -> int:
        """Return the first step from `step` on that is evaluated."""
        multiple = -(-step // self.every) * self.every
        return multiple if self.last is None or self.last < step else min(multiple, self.last)
