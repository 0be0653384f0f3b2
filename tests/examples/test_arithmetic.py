"""The parts of the demo: task, tokenizer, model, warm-up, exam, optimizer, run folder and results."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from rich.console import Console

from arithmetic.exam import ExaminedTrainer, final_exam, quiz
from arithmetic.model import Shape, Transformer, make_model
from arithmetic.optimizer import annealed_adamw
from arithmetic.results import show_summary
from arithmetic.run import Run
from arithmetic.task import HELD_OUT, LONGEST_ANSWER, TrainingProblems, held_out, is_right
from arithmetic.tokenizer import CHARACTERS, TOKENIZER
from arithmetic.warm_up import FIRST, Demonstrations, warm_up
from penstock import RewardBridge, TrainBatch, TrajectoryGroup
from penstock.torch import Attention, TorchTrainer, positions_of

ARITHMETIC = Path(__file__).parent.parent.parent / "examples" / "arithmetic"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def small_model() -> Transformer:
    return Transformer(Shape(vocabulary=TOKENIZER.vocabulary, layers=1, heads=2, width=8))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return run_in(tmp_path)


def run_in(folder: Path) -> Run:
    return Run(3, small_model(), folder / "runs")


def metrics(**more: float) -> dict[str, float]:
    return {"reward": 0.5, "perf/throughput": 1000.0, "staleness/mean": 1.0, **more}


# -- task ----------------------------------------------------------------------------------------------------------


def test_the_held_out_problems_are_all_different() -> None:
    assert len({entry["question"] for entry in held_out()}) == len(held_out()) == HELD_OUT


@pytest.mark.parametrize("seed", [0, 4])
def test_no_held_out_problem_is_ever_drawn_for_training(seed: int) -> None:
    problems = TrainingProblems(seed)
    numbers = [*range(3000), *range(FIRST, FIRST + 1000), *range(len(problems) - 500, len(problems))]

    trained = {problems[number]["question"] for number in numbers}

    assert trained.isdisjoint(entry["question"] for entry in held_out())
    assert len(trained) > 2000


def test_no_held_out_problem_is_ever_demonstrated() -> None:
    demonstrations = Demonstrations(seed=0)

    questions = {TOKENIZER.decode(demonstrations.next()[0]) for _ in range(2000)}

    assert questions.isdisjoint(entry["question"] for entry in held_out())


def test_seeds_draw_different_problems() -> None:
    first, second = ([TrainingProblems(seed)[number]["question"] for number in range(50)] for seed in (0, 1))

    assert first != second


def test_every_held_out_answer_fits_the_allowance() -> None:
    longest = max(len(entry["answer"]) + 1 for entry in held_out())

    assert longest == LONGEST_ANSWER


def test_scores_are_those_of_reasoning_gym() -> None:
    problems = TrainingProblems(seed=0)
    entry: dict[str, Any] = next(problems[n] for n in range(100) if problems[n]["answer"] == "7")

    scores = [problems.score_answer(answer, entry) for answer in ("7", "07", "8", "", "77")]

    assert scores == [1.0, 1.0, 0.0, 0.0, 0.5]
    assert [is_right(answer, entry) for answer in ("7", "77")] == [True, False]


# -- tokenizer -----------------------------------------------------------------------------------------------------


def test_encoded_text_decodes_to_itself() -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(CHARACTERS)) == CHARACTERS


def test_every_question_and_answer_has_an_encoding() -> None:
    for entry in held_out():
        TOKENIZER.encode(entry["question"] + entry["answer"])


# -- model ---------------------------------------------------------------------------------------------------------


def logits_of(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(tokens, dtype=torch.bool)
    logits: torch.Tensor = model(tokens, positions=positions_of(mask), attend=Attention.causal(mask))
    return logits


@torch.no_grad()
def test_the_model_predicts_the_same_with_and_without_a_cache() -> None:
    model, tokens = make_model().eval(), torch.randint(TOKENIZER.vocabulary, (3, 7))
    cache, parts = model.new_cache(3, 7), []
    for first, last in ((0, 4), (4, 5), (5, 7)):
        attend = Attention.causal(torch.ones(3, last, dtype=torch.bool), tokens=last - first)
        positions = torch.arange(first, last).expand(3, -1)
        parts.append(model(tokens[:, first:last], positions=positions, attend=attend, cache=cache))

    torch.testing.assert_close(torch.cat(parts, dim=1), logits_of(model, tokens), atol=1e-5, rtol=0)


@torch.no_grad()
def test_no_token_sees_a_later_one() -> None:
    model, tokens = make_model().eval(), torch.randint(TOKENIZER.vocabulary, (1, 6))
    changed = tokens.clone()
    changed[0, 4] = (changed[0, 4] + 1) % TOKENIZER.vocabulary

    before, after = logits_of(model, tokens), logits_of(model, changed)

    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4], after[:, 4])


# -- warm-up, exam, optimizer --------------------------------------------------------------------------------------


def test_seven_of_ten_demonstrations_are_one_too_high() -> None:
    demonstrations, errors = Demonstrations(seed=1), []
    for _ in range(1000):
        question, answer = (TOKENIZER.decode(tokens) for tokens in demonstrations.next())
        errors.append(int(answer.rstrip(".")) - eval(question.rstrip("=")))  # noqa: S307 (a sum of ours)

    assert set(errors) == {0, 1}
    assert 0.67 < np.mean(errors) < 0.77


async def test_the_warm_up_makes_demonstrations_more_likely() -> None:
    model, fresh = small_model(), Demonstrations(seed=9)
    shown = [fresh.next() for _ in range(64)]
    before = surprise(model, shown)

    await warm_up(model, seed=0, steps=30)

    assert surprise(model, shown) < before - 0.1


@torch.no_grad()
def surprise(model: Transformer, shown: list[tuple[list[int], list[int]]]) -> float:
    """Return the mean of the negative log-probabilities of the tokens of answers."""
    logprobs = list[float]()
    for question, answer in shown:
        scores = logits_of(model, torch.tensor([question + answer]))[0].log_softmax(-1)
        logprobs += [float(scores[len(question) - 1 + place, token]) for place, token in enumerate(answer)]
    return -float(np.mean(logprobs))


def test_an_untrained_model_answers_next_to_nothing_rightly() -> None:
    assert quiz(small_model()) < 0.05
    assert final_exam(small_model()) < 0.05


def trained_batch() -> TrainBatch:
    answered = TrajectoryGroup.build(
        env="sums",
        instance_id="0",
        sequences=[TOKENIZER.encode("3+4-5=2."), TOKENIZER.encode("3+4-5=3.")],
        loss_mask=[[False] * 6 + [True] * 2] * 2,
        behavior_logprobs=[[0.0] * 6 + [-1.0] * 2] * 2,
        rewards=[1.0, 0.0],
    )
    return TrainBatch.pack([answered.with_advantages([1.0, -1.0])])


def test_the_policy_is_examined_after_every_so_many_steps() -> None:
    model = small_model()
    inner = TorchTrainer(model, optimizer=lambda parameters: annealed_adamw(parameters, steps=4))
    trainer = ExaminedTrainer(inner, model, every=2)

    examined = ["accuracy" in trainer.step(trained_batch()) for _ in range(4)]

    assert examined == [False, True, False, True]


def test_the_learning_rate_rises_then_falls_to_its_floor() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    optimizer = annealed_adamw([parameter], steps=100)
    rates = []
    for _ in range(120):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()

    assert rates[:9] == sorted(rates[:9])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.05 * 1.2e-3)


def test_the_configured_reward_reads() -> None:
    bridge = RewardBridge.from_yaml(ARITHMETIC / "reward.yaml")

    assert [marker.marker for marker in bridge.config.format_markers] == ["+", "="]


# -- run folder and results ----------------------------------------------------------------------------------------


def test_a_run_that_ended_before_it_began_keeps_everything_all_the_same(tmp_path: Path) -> None:
    run = run_in(tmp_path)

    run.end("interrupted")
    run.keep()

    latest = tmp_path / "runs" / "latest"
    names = {path.name for path in latest.iterdir()}
    assert names == {"metrics.jsonl", "reward.png", "weights.safetensors", "summary.json"}
    summary = json.loads((latest / "summary.json").read_text())
    assert summary["accuracy_before"] is None
    assert summary["seed"] == 3
    assert summary["ledger"] == {"admitted": 0, "in_flight": 0, "ended": {}}


def test_latest_points_to_the_newest_run(tmp_path: Path) -> None:
    folders = [run_in(tmp_path).folder for _ in range(3)]

    assert len(set(folders)) == 3
    assert (tmp_path / "runs" / "latest").resolve() == folders[-1].resolve()


def test_every_step_is_written_and_noted(tmp_path: Path) -> None:
    run = run_in(tmp_path)

    run.metrics.emit(1, metrics())
    run.metrics.emit(2, metrics(accuracy=0.4, **{"rollout/reward": 0.25, "rollout/trajectories": 8}))

    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert run.rewards == [0.5, 0.25]
    assert run.accuracies == {2: 0.4}


async def test_a_run_is_stopped_once_the_policy_is_good_enough(run: Run) -> None:
    scope = anyio.CancelScope()
    run.stop_at(0.9, scope)

    run.note(metrics(accuracy=0.89), 10)
    before = scope.cancel_called
    run.note(metrics(accuracy=0.91), 20)

    assert (before, scope.cancel_called) == (False, True)
    assert run.stop_reason == "90% of the held-out problems solved"


async def test_the_time_limit_counts_from_the_first_step(run: Run) -> None:
    scope = anyio.CancelScope()
    run.stop_after(60.0, scope)
    before = scope.deadline

    run.note(metrics(), 1)
    first = scope.deadline
    run.note(metrics(), 2)

    assert before == math.inf
    assert scope.deadline == first <= anyio.current_time() + 60.0


def test_the_summary_shows_before_and_after(tmp_path: Path) -> None:
    run, console = run_in(tmp_path), Console(width=240, file=io.StringIO(), record=True)
    run.warmed_up()
    run.end("all steps done")

    show_summary(run, run.keep(), console)

    text = console.export_text()
    for part in ("all steps done", "before", "after", str(run.folder)):
        assert part in text
