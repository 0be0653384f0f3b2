"""Rules about the updates of the weights: the learning rate, the ratio, the divergence and the entropy."""

from __future__ import annotations

from .finding import Evidence, Rule, short
from .seen_run import SeenRun

LEAST_STEPS = 5
"""Steps in a row that these rules need: a warm-up begins with a rate of 0, and one batch may be odd."""

LOW_RATE = 0.01
"""Share of the configured rate that a warm-up should have passed within the steps seen."""

FEW_CHANGED = 0.2
"""Share of the weights, in the step that changed most. A step in float32 changes nearly all that have a gradient, of a
mixture of experts and of a large vocabulary too; below this share only those that are almost 0 still change."""

HIGH_KL = 0.2
"""Nats per token between the policy that sampled and the one that trains: 0.0001 to 0.05 in runs that learn, with lags
of up to 4 steps. From 0.2 on the ratio of an average token is off by half."""

HIGH_REFERENCE_KL = 5.0
"""Nats per token from the reference: runs that learn end at 0.01 to 1. From 5 on the model says other things at all."""

FEW_EFFECTIVE = 0.5
"""Effective share of the tokens, 1 where all weigh alike: below a half most of the batch has no say."""

LOW_ENTROPY = 0.02
"""Nats per token: 99.7 % of the probability is on one token, and completions of a prompt are copies."""

RATE = "algorithm.optimizer.lr"


def learning_rate_zero(run: SeenRun) -> Evidence | None:
    """Find a rate that is 0 in the last steps, or a warm-up that has passed no hundredth of the configured rate."""
    rates, given = run.courses.of("lr"), run.config.algorithm.optimizer.lr
    if rates.count < LEAST_STEPS:
        return None
    ended = max(rates.recent(LEAST_STEPS)) == 0
    if ended:
        return Evidence(
            f"lr 0 in {rates.steps(LEAST_STEPS)}", (f"{RATE}=1e-6", "algorithm.optimizer.schedule=constant")
        )
    if given is None or not 0 < rates.highest < LOW_RATE * given:
        return None
    return Evidence(
        f"lr at most {short(rates.highest)} of {short(given)} in {run.step} steps",
        (f"algorithm.optimizer.warmup_steps={max(1, run.step // 10)}",),
    )


def updates_lost_in_rounding(run: SeenRun) -> Evidence | None:
    """Find steps with a rate and a gradient that leave nearly all weights as they were."""
    changed, norms, rates = (run.courses.of(name) for name in ("weights/changed", "grad_norm", "lr"))
    if changed.count < LEAST_STEPS or min(norms.recent(LEAST_STEPS)) <= 0 or min(rates.recent(LEAST_STEPS)) <= 0:
        return None
    if changed.highest >= FEW_CHANGED:
        return None
    return Evidence(
        f"{changed.mean(LEAST_STEPS):.2%} of the weights changed in {changed.steps(LEAST_STEPS)}, and at most "
        f"{changed.highest:.2%} in any step; lr {short(rates.mean(LEAST_STEPS))}",
        (f"{RATE}={short(max(100 * rates.highest, 1e-6))}",),
    )


def kl_exploding(run: SeenRun) -> Evidence | None:
    """Find a policy that moves far in a step, or far from the reference."""
    for name, bound in (("kl", HIGH_KL), ("ref_kl", HIGH_REFERENCE_KL)):
        course = run.courses.of(name)
        if course.count >= LEAST_STEPS and course.middle(LEAST_STEPS) >= bound:
            return Evidence(
                f"{name} {short(course.middle(LEAST_STEPS))} nats per token in {course.steps(LEAST_STEPS)}, expected "
                f"less than {bound}",
                (_lower_rate(run), _more_kl(run)),
            )
    return None


def ratio_collapsed(run: SeenRun) -> Evidence | None:
    """Find batches in which few tokens have nearly all the weight."""
    course = run.courses.of("ratio/effective_sample_size")
    if course.count < LEAST_STEPS or course.middle(LEAST_STEPS) >= FEW_EFFECTIVE:
        return None
    highest = run.courses.of("ratio/max").mean(LEAST_STEPS)
    return Evidence(
        f"ratio/effective_sample_size {short(course.middle(LEAST_STEPS))} in {course.steps(LEAST_STEPS)}, expected at "
        f"least {FEW_EFFECTIVE}; ratio/max {short(highest)}",
        ("algorithm.max_lag=0", _lower_rate(run)),
    )


def entropy_gone(run: SeenRun) -> Evidence | None:
    """Find a policy that always samples the same, while its reward is not high."""
    course = run.courses.of("entropy")
    if course.count < LEAST_STEPS or course.middle(LEAST_STEPS) >= LOW_ENTROPY or run.improves:
        return None
    return Evidence(
        f"entropy {short(course.middle(LEAST_STEPS))} nats per token in {course.steps(LEAST_STEPS)}, "
        f"{short(course.began_with())} at the beginning",
        ("algorithm.entropy=0.001", _lower_rate(run), "sampling.temperature=1.0"),
    )


def _lower_rate(run: SeenRun) -> str:
    """Return a tenth of the highest rate of the run, as a value of the configuration."""
    rates = run.courses.of("lr")
    return f"{RATE}={short(rates.highest / 10)}" if rates.count and rates.highest > 0 else f"{RATE}=1e-6"


def _more_kl(run: SeenRun) -> str:
    weight = run.config.algorithm.kl
    return f"algorithm.kl={short(10 * weight)}" if weight is not None and weight else "algorithm.kl=0.01"


LEARNING_RATE_ZERO, LOST_IN_ROUNDING, KL_EXPLODING, RATIO_COLLAPSED, ENTROPY_GONE = (
    Rule(
        name="learning_rate_zero",
        look=learning_rate_zero,
        reads=("lr",),
        means="the optimizer changes nothing",
        causes=(
            "a warm-up that is longer than the run",
            "a schedule that has come to its end",
            "a rate of 0 in a script",
        ),
        keys=("algorithm.optimizer.warmup_steps", RATE, "algorithm.optimizer.schedule"),
    ),
    Rule(
        name="updates_lost_in_rounding",
        look=updates_lost_in_rounding,
        reads=("weights/changed", "grad_norm", "lr"),
        means="updates are smaller than half a unit in the last place of the weights",
        causes=("a learning rate that is far too small", "weights that train in bfloat16 or float16 in a script"),
        keys=(RATE,),
    ),
    Rule(
        name="kl_exploding",
        look=kl_exploding,
        reads=("kl",),
        also_reads=("ref_kl", "lr"),
        means="the policy moves so far that what was sampled says little about it",
        causes=(
            "a learning rate that is too high",
            "sampled at another temperature, precision or template than it trains",
            "a reward that is highest for text without sense, and no KL term",
        ),
        keys=(RATE, "algorithm.kl"),
    ),
    Rule(
        name="ratio_collapsed",
        look=ratio_collapsed,
        reads=("ratio/effective_sample_size", "ratio/max"),
        also_reads=("lr",),
        means="few tokens have nearly all the weight of a batch",
        causes=(
            "trajectories that are too old",
            "a learning rate that is too high",
            "a sampler that computes other probabilities than the trainer: precision, quantization, another model",
        ),
        keys=("algorithm.max_lag", RATE),
    ),
    Rule(
        name="entropy_gone",
        look=entropy_gone,
        reads=("entropy", "reward"),
        also_reads=("lr", "sampled/reward/min", "sampled/reward/max"),
        means="the completions of a prompt are copies of each other, although their reward is not high",
        causes=(
            "a learning rate that is too high",
            "too many steps on few prompts",
            "a temperature near 0",
        ),
        keys=("algorithm.entropy", RATE, "sampling.temperature"),
    ),
)
