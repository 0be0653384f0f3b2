from __future__ import annotations

import anyio
from anyio.lowlevel import checkpoint

from penstock._pipeline.accounting.evaluations import EvaluationPart, Evaluations
from penstock.accounting import Metrics


def part(step: int, worker: int, value: float, count: int, **others: object) -> EvaluationPart:
    return EvaluationPart(step, worker, 2, {"eval/a/mean@1": (value, count)}, {"eval/a/missing": 1}, **others)  # type: ignore[arg-type]


def test_an_evaluation_is_emitted_only_when_the_parts_of_all_workers_are_here() -> None:
    metrics = Metrics()

    metrics.evaluated(part(20, 1, 3, 4))
    before = metrics.emit(21)
    metrics.evaluated(part(20, 0, 0, 2))

    assert not [name for name in before if name.startswith("eval/")]
    emitted = {name: value for name, value in metrics.emit(22).items() if name.startswith("eval/")}
    assert emitted == {"eval/a/mean@1": 0.5, "eval/a/missing": 2, "eval/step": 20}
    assert "eval/step" not in metrics.emit(23)


def test_a_part_that_a_restarted_worker_repeats_counts_once() -> None:
    evaluations = Evaluations()

    evaluations.add(part(20, 0, 4, 4))
    evaluations.add(part(20, 0, 4, 4))
    evaluations.add(part(20, 1, 0, 4))
    evaluations.add(part(20, 1, 0, 4))

    assert evaluations.take()["eval/a/mean@1"] == 0.5
    assert evaluations.take() == {}


def test_an_evaluation_that_is_never_complete_is_dropped_by_a_later_one() -> None:
    evaluations = Evaluations()

    evaluations.add(part(20, 0, 4, 4))
    evaluations.add(part(40, 0, 4, 4))
    evaluations.add(part(40, 1, 4, 4))
    evaluations.add(part(20, 1, 0, 4))

    assert evaluations.take()["eval/step"] == 40
    assert evaluations.take() == {}


def test_parts_that_are_not_whole_are_progress_and_are_not_merged() -> None:
    evaluations = Evaluations()

    evaluations.add(part(20, 0, 0, 0, prompts=6, left=4))
    evaluations.add(part(20, 1, 0, 0, prompts=5, left=5))
    shown = evaluations.going_on
    evaluations.add(part(20, 0, 4, 6, prompts=6))
    later = evaluations.going_on
    evaluations.add(part(20, 1, 1, 4, prompts=5))

    assert (shown, later) == ("evaluation of step 20, 2 of 11 prompts", "evaluation of step 20, 6 of 11 prompts")
    assert evaluations.going_on == ""
    assert evaluations.take()["eval/a/mean@1"] == 0.5


def test_a_mean_that_a_worker_could_not_finish_is_not_shown() -> None:
    evaluations = Evaluations()

    evaluations.add(part(20, 0, 4, 4))
    evaluations.add(part(20, 1, 1, 1, failed=("eval/a/",)))

    assert evaluations.take() == {"eval/a/missing": 2, "eval/step": 20}


def test_a_worker_sends_its_part_at_once_and_the_trainers_process_merges_it() -> None:
    worker, trainer, sent = Metrics(), Metrics(), []
    worker.send_evaluation = lambda: sent.append(worker.take())

    worker.evaluated(EvaluationPart(0, 0, 1, {"eval/a/reward": (1.0, 2.0)}))
    trainer.merge(sent[0])

    assert trainer.emit(1)["eval/a/reward"] == 0.5
    assert not worker


async def test_a_wait_for_an_evaluation_ends_with_it_or_with_the_source() -> None:
    evaluations = Evaluations()

    with evaluations.expected():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(evaluations.finished, 20)
            await checkpoint()
            assert evaluations.awaited == "evaluation of step 20"
            evaluations.add(part(20, 0, 0, 1))
            evaluations.add(part(20, 1, 0, 1))
    async with anyio.create_task_group() as tasks:
        with evaluations.expected():
            tasks.start_soon(evaluations.finished, 20)
            await checkpoint()
