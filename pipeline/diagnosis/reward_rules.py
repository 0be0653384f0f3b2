"""Rules about rewards: those of the completions of a prompt compared with each other, and those of evaluations."""

from __future__ import annotations

from collections.abc import Callable

from ..accounting.constant_steps import STEPS_IN_A_ROW
from .course import WINDOW, Evaluated
from .finding import Evidence, Rule, short
from .seen_run import SOLVED, SeenRun

LEAST_STEPS = 10
"""Steps that these rules need, so that a few prompts that happen to be alike are none."""

MOST_ALIKE = 0.8
"""Share of the prompts whose completions were all scored alike, four fifths of the sampling for nothing."""

UNSOLVED = 0.1
"""Level of the mean reward below which prompts are too hard."""

LEAST_EVALUATIONS = 3
"""Evaluations that make a course."""

FALLS = 0.1
"""Share of the best evaluation that the last two have lost: more than the noise of 200 prompts."""

GROUP = "algorithm.group_size"


def no_learning_signal(run: SeenRun) -> Evidence | None:
    """Find steps in a row without a gradient from rewards, as `LearningSignal` counts and warns of them.

    A run that has come to the highest rewards has nothing left to learn.
    """
    in_a_row = int(run.courses.of("batch/steps_without_signal").mean(1))
    if in_a_row < STEPS_IN_A_ROW or run.improves:
        return None
    reward = run.courses.of("reward").mean(1)
    return Evidence(
        f"no gradient from rewards in {in_a_row} steps in a row, up to step {run.step}; reward {short(reward)}",
        _more_varied(run),
    )


def prompts_too_hard(run: SeenRun) -> Evidence | None:
    """Find prompts that are hardly ever answered well."""
    return _too_simple(run, lambda level: level <= UNSOLVED, "lowest")


def prompts_too_easy(run: SeenRun) -> Evidence | None:
    """Find prompts that were answered well before any training."""
    began = run.level([value for _, value in run.courses.of("reward").first])
    return None if began is None or began < SOLVED else _too_simple(run, lambda level: level >= SOLVED, "highest")


def evaluation_falls(run: SeenRun) -> Evidence | None:
    """Find an evaluation that falls while the reward of training rises."""
    for name, kept in run.courses.evaluations.items():
        evaluated = list(kept)
        best = max(evaluated, key=lambda each: each.value)
        last = evaluated[-2:]
        if len(evaluated) >= LEAST_EVALUATIONS and best not in last and all(_falls(best, each) for each in last):
            return Evidence(
                f"{name} {short(best.value)} of step {best.step} and {short(last[-1].value)} of step {last[-1].step}, "
                f"while the reward went from {short(best.reward)} to {short(last[-1].reward)}",
                ("algorithm.kl=0.01", f"algorithm.steps={max(best.step, 1)}"),
            )
    return None


def _falls(best: Evaluated, later: Evaluated) -> bool:
    """Return whether a later evaluation is lower than the best one, with a higher reward."""
    rose = not later.reward <= best.reward  # that of an evaluation before the first step is NaN
    return rose and later.value < best.value - FALLS * abs(best.value)


def _too_simple(run: SeenRun, is_extreme: Callable[[float], bool], extreme: str) -> Evidence | None:
    """Find prompts whose completions are nearly all scored alike, at one end of the rewards, without a rise."""
    alike, reward = run.courses.of("frac_reward_zero_std"), run.courses.of("reward")
    level = run.level(reward.recent())
    if alike.count < LEAST_STEPS or alike.mean() < MOST_ALIKE or level is None or not is_extreme(level):
        return None
    if reward.rises():
        return None
    return Evidence(
        f"the completions of {alike.mean():.0%} of the prompts scored alike, near the {extreme} reward, in "
        f"{alike.steps()}; reward {short(reward.mean())}",
        _more_varied(run),
    )


def _more_varied(run: SeenRun) -> tuple[str, ...]:
    size = run.config.algorithm.group_size
    return (f"{GROUP}={2 * size if size is not None else WINDOW}", "data.curriculum={}", "sampling.temperature=1.0")


NO_SIGNAL, TOO_HARD, TOO_EASY, EVALUATION_FALLS = (
    Rule(
        name="no_learning_signal",
        look=no_learning_signal,
        reads=("batch/steps_without_signal", "reward"),
        also_reads=("sampled/reward/min", "sampled/reward/max"),
        means="the completions of each prompt were scored alike, so no step had a gradient from rewards",
        causes=(
            "a mistake in the reward function: read `penstock samples`",
            "an answer in another form than the reward expects",
            "prompts that are all too hard, or all too easy",
            "completions of a prompt that are all equal: a temperature near 0, or a small group",
        ),
        keys=(GROUP, "data.curriculum", "sampling.temperature"),
    ),
    Rule(
        name="prompts_too_hard",
        look=prompts_too_hard,
        reads=("frac_reward_zero_std", "reward"),
        also_reads=("sampled/reward/min", "sampled/reward/max"),
        means="most prompts are never answered well, and give no gradient",
        causes=(
            "problems beyond the model",
            "a reward without parts for partial success",
            "an answer in a form that the prompt does not ask for",
        ),
        keys=(GROUP, "data.curriculum", "sampling.temperature"),
    ),
    Rule(
        name="prompts_too_easy",
        look=prompts_too_easy,
        reads=("frac_reward_zero_std", "reward"),
        also_reads=("sampled/reward/min", "sampled/reward/max"),
        means="most prompts were answered well before training, and give no gradient",
        causes=("problems that the model solves already", "a reward that is given too easily"),
        keys=(GROUP, "data.curriculum", "sampling.temperature"),
    ),
    Rule(
        name="evaluation_falls",
        look=evaluation_falls,
        reads=("eval/", "reward"),
        means="the model gets better at the reward of training, and worse at the task",
        causes=(
            "a reward that can be had without the task",
            "too many epochs of few prompts",
            "an evaluation of another kind than the training: other prompts, a greedy temperature, another template",
        ),
        keys=("algorithm.kl", "algorithm.steps"),
    ),
)
