"""Rules about the trajectories that are trained, and those that end otherwise."""

from __future__ import annotations

from math import isfinite

from ..accounting.end_states import EndState
from ..accounting.progress_guard import LEAST_WARNED_AT, REMEDIES
from .course import WINDOW
from .finding import Evidence, Rule, short
from .seen_run import SeenRun

LEAST_STEPS = 10
"""Steps that these rules need: the first ones are filled while the samplers start."""

MOST_DROPPED = 0.5
"""Share of the trajectories from which more were sampled for nothing than were trained."""

MOST_STALE = 0.2
"""Share of the trajectories: a fifth of the sampling for nothing, which pacing the samplers avoids."""

OLD = 8.0
"""Steps that the weights which sampled are behind: runs with a lag of up to 4 learn as those in turn do."""

FAR = 0.25
"""Difference of the means, as a share of the mean length, or of the range of rewards: filters shift both a little."""

DROPPED: dict[EndState, str] = {
    state: f"dropped/{state}" for state in ("filtered", "stale", "rejected", "failed", "lost")
}


def nothing_trained(run: SeenRun) -> Evidence | None:
    """Find a run without a step, although as many trajectories ended as `ProgressGuard` warns of."""
    untrained: dict[EndState, int] = {state: count for state, count in run.ends.items() if state in DROPPED and count}
    if run.step or run.ends.get("trained") or sum(untrained.values()) < LEAST_WARNED_AT:
        return None
    listed = ", ".join(f"{count:,} {state}" for state, count in untrained.items())
    most = max(untrained, key=untrained.__getitem__)
    return Evidence(
        f"no optimizer step, and trajectories that ended: {listed}. {REMEDIES[most]}", _undropped(most, run)
    )


def most_dropped(run: SeenRun) -> Evidence | None:
    """Find steps between which more trajectories were dropped than trained."""
    trained = sum(run.courses.of("batch/trajectories").recent())
    dropped: dict[EndState, float] = {state: sum(_since(run, name)) for state, name in DROPPED.items()}
    total = sum(dropped.values())
    if run.courses.of("batch/trajectories").count < LEAST_STEPS or total < MOST_DROPPED * (total + trained):
        return None
    most = max(dropped, key=dropped.__getitem__)
    steps = run.courses.of("batch/trajectories").steps()
    return Evidence(
        f"{total:,.0f} trajectories dropped, most of them {most}, and {trained:,.0f} trained in {steps}. "
        f"{REMEDIES[most]}",
        _undropped(most, run),
    )


def too_old(run: SeenRun) -> Evidence | None:
    """Find trajectories that were too old to train, or are trained when they are old."""
    lags, trained = run.courses.of("staleness/mean"), run.courses.of("batch/trajectories")
    if lags.count < LEAST_STEPS:
        return None
    stale = sum(_since(run, DROPPED["stale"]))
    share = stale / (stale + sum(trained.recent()) or 1)
    if share < MOST_STALE and lags.mean() < OLD:
        return None
    return Evidence(
        f"staleness/mean {short(lags.mean())} steps, and {share:.0%} of the trajectories dropped as stale, in "
        f"{lags.steps()}",
        (_lag(run, more=share >= MOST_STALE), "placement.samplers=1"),
    )


def trained_differ_from_sampled(run: SeenRun) -> Evidence | None:
    """Find trained trajectories that are longer or shorter, better or worse than those that were sampled."""
    if run.courses.of("trained/length/mean").count < LEAST_STEPS:
        return None
    for name in ("length", "reward"):
        trained, sampled = (run.courses.of(f"{of}/{name}/mean").mean() for of in ("trained", "sampled"))
        scale = sampled if name == "length" else _range(run)
        if isfinite(scale) and scale > 0 and abs(trained - sampled) > FAR * scale:
            return Evidence(
                f"mean {name} {short(trained)} of the trained, {short(sampled)} of all sampled trajectories in "
                f"{run.courses.of('trained/length/mean').steps()}",
                ("algorithm.drop_zero_variance=false", _lag(run, more=True)),
            )
    return None


def _range(run: SeenRun) -> float:
    return run.courses.of("sampled/reward/max").highest - run.courses.of("sampled/reward/min").lowest


def _since(run: SeenRun, name: str) -> list[float]:
    """Return the values of a total in the last WINDOW steps; it is emitted only in those in which it was counted."""
    return [value for step, value in run.courses.of(name).last if step > run.step - WINDOW]


def _lag(run: SeenRun, *, more: bool) -> str:
    lag = run.config.algorithm.max_lag
    known = lag if lag is not None else 1
    return f"algorithm.max_lag={known + 1 if more else min(known, 1)}"


def _undropped(state: EndState, run: SeenRun) -> tuple[str, ...]:
    """Return values to try where most trajectories end in `state`."""
    by_state: dict[EndState, tuple[str, ...]] = {
        "filtered": ("algorithm.drop_zero_variance=false", "algorithm.group_size=16"),
        "stale": (_lag(run, more=True), "placement.samplers=1"),
        "rejected": ("data.max_prompt_tokens=2048",),
    }
    return by_state.get(state, ("placement.samplers=1",))


NOTHING_TRAINED, MOST_DROPPED_RULE, TOO_OLD, TRAINED_DIFFER = (
    Rule(
        name="nothing_trained",
        look=nothing_trained,
        reads=(),
        means="trajectories end, and none is trained",
        causes=("a filter that keeps none", "rollouts or rewards that fail", "prompts beyond the bound"),
        keys=(
            *("algorithm.drop_zero_variance", "algorithm.group_size", "data.max_prompt_tokens"),
            *("algorithm.max_lag", "placement.samplers"),
        ),
    ),
    Rule(
        name="most_dropped",
        look=most_dropped,
        reads=("batch/trajectories",),
        also_reads=tuple(DROPPED.values()),
        means="more trajectories are sampled for nothing than are trained",
        causes=("prompts too hard or too easy for a filter", "rollouts that fail", "samplers that are far ahead"),
        keys=(
            *("algorithm.drop_zero_variance", "algorithm.group_size", "data.max_prompt_tokens"),
            *("algorithm.max_lag", "placement.samplers"),
        ),
    ),
    Rule(
        name="too_old",
        look=too_old,
        reads=("staleness/mean", "batch/trajectories"),
        also_reads=(DROPPED["stale"],),
        means="trajectories are old when they are trained, or too old to be",
        causes=("samplers that are faster than the trainer", "rollouts of very different lengths", "a large `max_lag`"),
        keys=("algorithm.max_lag", "placement.samplers"),
    ),
    Rule(
        name="trained_differ_from_sampled",
        look=trained_differ_from_sampled,
        reads=tuple(f"{of}/{name}/mean" for of in ("trained", "sampled") for name in ("length", "reward")),
        also_reads=("sampled/reward/min", "sampled/reward/max"),
        means="filters or the bound on the lag keep some kind of trajectory from training",
        causes=(
            "long rollouts that are stale when they end",
            "a filter that drops what was scored alike",
            "a stage that drops long completions",
        ),
        keys=("algorithm.drop_zero_variance", "algorithm.max_lag"),
    ),
)
