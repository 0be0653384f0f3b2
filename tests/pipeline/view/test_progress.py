from __future__ import annotations

import pytest

from penstock import SinkTrainer, StageInfo
from penstock._pipeline.view.progress import Progress


def step(**more: float) -> dict[str, float]:
    return {"perf/time_per_step": 2.0, "perf/total_num_tokens": 500.0, "batch/trajectories": 8.0} | more


def progress(steps: int, max_steps: int | None = None) -> Progress:
    made = Progress(max_steps)
    for number in range(1, steps + 1):
        made.note(step(), number)
    return made


def test_the_time_that_is_left_follows_from_the_speed_of_the_last_steps() -> None:
    assert progress(steps=4, max_steps=10).state().left_s == 6 * 2.0


@pytest.mark.parametrize(("steps", "max_steps"), [(4, None), (0, 10), (1, 10)])
def test_without_a_last_step_or_a_speed_no_time_is_shown(steps: int, max_steps: int | None) -> None:
    assert progress(steps, max_steps).state().left_s is None


def test_the_first_step_which_includes_the_start_of_the_workers_counts_for_no_speed() -> None:
    steps = Progress(10)
    steps.note(step(**{"perf/time_per_step": 60.0}), 1)

    steps.note(step(), 2)

    assert steps.state().left_s == 8 * 2.0
    assert steps.state().rates == {"tokens/s": 250.0, "trajectories/s": 4.0}


def test_a_speed_that_no_metric_gives_is_not_known() -> None:
    steps = Progress()
    for number in range(3):
        steps.note({"perf/time_per_step": 2.0}, number)

    assert steps.state().rates == {}


def test_metrics_that_a_trainer_emits_now_and_then_keep_their_last_value() -> None:
    steps = progress(steps=2)
    steps.note(step(accuracy=0.5), 3)
    steps.note(step(reward=1.0, **{"eval/loss": 2.0}), 4)

    assert [(name, last) for name, last, _ in steps.state().metrics] == [
        ("reward", 1.0),
        ("accuracy", 0.5),
        ("eval/loss", 2.0),
    ]


def test_a_sink_that_emits_no_metrics_has_steps_all_the_same() -> None:
    assert Progress().state(step=7).step == 7


class Trainer:
    def step(self, batch: object) -> dict[str, float]:
        raise NotImplementedError


def test_the_last_step_is_that_of_the_sink() -> None:
    info: StageInfo = SinkTrainer(Trainer(), max_steps=7).stage_info()

    assert info.max_steps == 7
