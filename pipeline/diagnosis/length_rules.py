"""Rules about the lengths of completions."""

from __future__ import annotations

from .finding import Evidence, Rule
from .seen_run import SeenRun

LEAST_STEPS = 20
"""Steps that these rules need: an untrained model may take some until it ends its answers, or its reward rises."""

MOST_CUT = 0.5
"""Share of the completions that were cut, from which most rewards judge an answer that is not complete."""

BOUND = "sampling.max_completion_tokens"


def end_tokens_never_sampled(run: SeenRun) -> Evidence | None:
    """Find a run in which no completion has ended by itself."""
    cut = run.courses.of("response_length/clip_ratio")
    if cut.count < LEAST_STEPS or cut.lowest < 1 or run.samples.stop_reasons.keys() - {"length"} or run.improves:
        return None
    return Evidence(
        f"response_length/clip_ratio 1 in all {cut.count} steps: no completion ended by itself",
        (_longer(run), 'sampling.stop=["</answer>"]'),
    )


def lengths_at_bound(run: SeenRun) -> Evidence | None:
    """Find steps in which most completions were cut, and some not."""
    cut = run.courses.of("response_length/clip_ratio")
    if cut.count < LEAST_STEPS or min(cut.recent()) < MOST_CUT or run.improves or end_tokens_never_sampled(run):
        return None
    return Evidence(
        f"{cut.mean():.0%} of the completions were cut at the bound{_bound(run)} in {cut.steps()}",
        (_longer(run), "algorithm.mask_truncated=true"),
    )


def _bound(run: SeenRun) -> str:
    bound = run.config.sampling.max_completion_tokens
    return "" if bound is None else f" of {bound} tokens"


def _longer(run: SeenRun) -> str:
    bound = run.config.sampling.max_completion_tokens
    return f"{BOUND}={2 * bound if bound is not None else 2048}"


NEVER_END, AT_BOUND = (
    Rule(
        name="end_tokens_never_sampled",
        look=end_tokens_never_sampled,
        reads=("response_length/clip_ratio", "reward"),
        also_reads=("sampled/reward/min", "sampled/reward/max"),
        means="no completion ends by itself, so each is cut",
        causes=(
            "a bound that is shorter than an answer",
            "a base model that was never taught to end",
            "an end token that the model's `generation_config.json` does not name: `sampling.stop_ids`",
            "a chat template of another model",
        ),
        keys=(BOUND, "sampling.stop"),
    ),
    Rule(
        name="lengths_at_bound",
        look=lengths_at_bound,
        reads=("response_length/clip_ratio", "reward"),
        also_reads=("sampled/reward/min", "sampled/reward/max"),
        means="most completions are cut before their answer, and scored for that",
        causes=("a bound that is shorter than an answer", "completions that repeat themselves"),
        keys=(BOUND, "algorithm.mask_truncated"),
    ),
)
