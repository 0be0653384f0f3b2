"""A configured run that is continued: with the same values, with others, and to the weights that it would have had."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.command_line import ran
from tests.models_hf.questions import Questions, Ran, write_questions

from penstock.errors import RunDiffers

ModelFolder = Callable[[str], Path]


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory, model_folder: ModelFolder) -> Iterator[Questions]:
    """Return questions, in the current folder."""
    with chdir(tmp_path_factory.mktemp("questions")):
        yield write_questions(Path.cwd(), model_folder("qwen2"))


@dataclass(frozen=True)
class Parts:
    """A run of two steps, the same again, and the same with a third step and other values."""

    first: Ran
    written: dict[str, float]
    """The summary of the first part."""
    again: Ran
    later: Ran


@pytest.fixture(scope="module")
def parts(questions: Questions) -> Parts:
    chosen = {"samples": {"every": 100, "count": 1}}
    first = questions.train("algorithm.steps=2", **chosen)
    written = json.loads((first.folder / "summary.json").read_text())
    again = questions.train("algorithm.steps=2", **chosen)
    code = questions.folder / f"{questions.module}.py"
    code.write_text(code.read_text() + "\n")
    changed = ["algorithm.steps=3", "algorithm.optimizer.lr=0.5", "algorithm.optimizer.betas=[0.5, 0.6]"]
    return Parts(first, written, again, questions.train(*changed, **chosen))


def test_a_run_that_is_continued_keeps_the_accuracy_before_training_and_one_that_was_whole_both(parts: Parts) -> None:
    first, again, later = parts.first.summary, parts.again.summary, parts.later.summary

    assert parts.written["reward_before"] == first.reward_before == later.reward_before
    assert again.reward_after == first.reward_after
    assert [line["eval/step"] for line in parts.later.evaluations()] == [0, 2, 3]
    assert later.reward_after == pytest.approx(parts.later.evaluations()[-1]["eval/train/reward"])


def test_a_continued_run_has_the_new_rate_says_so_and_refuses_other_data(parts: Parts, questions: Questions) -> None:
    printed = [line for line in parts.later.printed.splitlines() if "continued from step 2 with" in line]

    changed = {line.rpartition(" with ")[2].partition(":")[0] for line in printed}
    applied = {f"algorithm.{key}" for key in ("steps", "optimizer.lr", "optimizer.betas")}
    assert changed == {*applied, f"code.{questions.module}"}
    assert [line["lr"] for line in parts.later.steps()] == [1e-2, 1e-2, 0.5]
    rates = [
        json.loads(path.read_bytes())["algorithm"]["optimizer"]["lr"]
        for path in sorted(parts.later.folder.glob("config*"))
    ]
    assert rates == [1e-2, 0.5]
    with pytest.raises(RunDiffers, match=r"got other values of seed: 0 → 1: "):
        questions.train("seed=1")
    rows = Path("train.jsonl").read_text()
    Path("train.jsonl").write_text('{"question": "1+1="}\n' * 30)
    with pytest.raises(RunDiffers, match=r"SourceEnv\.data\.digest: "):
        questions.train("algorithm.steps=4", "algorithm.optimizer.lr=0.5")
    Path("train.jsonl").write_text(rows)


def test_the_samples_of_a_run_that_is_continued_have_those_of_each_evaluation_once_with_the_right_answer(
    parts: Parts,
) -> None:
    found = [line for line in parts.later.lines("samples.jsonl") if line["evaluated"] is not None]

    assert [(line["step"], line["evaluated"], line["set"], line["kind"]) for line in found] == [
        (step, evaluated, "train", kind) for step, evaluated in ((1, 0), (2, 2), (3, 3)) for kind in ("best", "worst")
    ]
    answers = {str(json.loads(line)["answer"]) for line in Path("train.jsonl").read_text().splitlines()}
    assert all(line["answer"] in answers for line in found)
    assert all(line["reward"] == line["parts"]["shorter"] for line in found)
    for step, part in ((2, parts.first), (3, parts.later)):  # at the end: of several within five seconds, the last one
        assert f"best of evaluation of step {step}, train: reward" in part.printed
    _, printed = ran("samples", "run", "--best", 1)
    assert "step 1, best 1" in printed
    assert "evaluation of step 3, train, best 1" in printed
    assert f"right answer\n  {found[-2]['answer']}" in printed


ALGORITHM = (
    "algorithm.loss=dppo",
    "algorithm.advantages=maxrl",
    "algorithm.aggregation=prompt-mean",
    "algorithm.kl=0.1",
    "algorithm.adaptive_kl={target: 0.001, horizon: 50}",
    "algorithm.optimizer.schedule=constant",
    "reward.overlong={length: 12, cache: 12, penalty: 0.1}",
    "folder=adaptive",
)


@pytest.mark.long
def test_the_weight_of_a_divergence_goes_on_in_a_continued_run(questions: Questions) -> None:
    questions.train(*ALGORITHM, "algorithm.steps=2")
    steps = questions.train(*ALGORITHM, "algorithm.steps=3").steps()

    weights = [step["adaptive_kl/weight"] for step in steps]
    errors = [min(max(step["adaptive_kl/kl"] / 0.001 - 1, -0.2), 0.2) for step in steps]
    assert weights[0] == 0.1
    assert weights[1:] == pytest.approx([w * (1 + e * 8 / 50) for w, e in zip(weights, errors, strict=True)][:-1])
    assert len(set(weights)) == 3
    assert steps[0]["ref_kl"] == pytest.approx(0, abs=1e-4)  # to the model before training
    assert steps[-1]["ref_kl"] > 1e-4
    assert "rewards/overlong" in steps[0]
