"""A configured run trains a model in a folder on a file of questions, and makes the objects that a script makes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import chdir
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests import command_line
from tests.models_hf.questions import Questions, Ran, equal, weights_in, write_questions
from tests.run_parts import run_parts

from penstock import AdvantageNormalizer, Batcher, Pipeline, RewardBridge, SinkTrainer, SourceEnv, processes, source
from penstock.chat import ChatFormat
from penstock.data import PromptDataset
from penstock.errors import NothingTrained, PenstockError
from penstock.models import HFModel
from penstock.policies import PretrainedTokenizer, SamplingParams
from penstock.rewards import trl_reward
from penstock.runs import Summary, describe_run, load_run_config
from penstock.torch import TorchPolicy, TorchTrainer, adamw
from penstock.weights import WeightPublisher

ModelFolder = Callable[[str], Path]


@pytest.fixture(scope="module", autouse=True)
def _questions_are_in_the_current_folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with chdir(tmp_path_factory.mktemp("questions")):
        yield


@pytest.fixture(scope="module")
def questions(model_folder: ModelFolder) -> Questions:
    return write_questions(Path.cwd(), model_folder("qwen2"))


@pytest.fixture
def values(questions: Questions) -> dict[str, Any]:
    return questions.values


# -- one run, with a preparation and evaluations -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran(questions: Questions) -> Ran:
    """Return a run of four steps, with an evaluation every three of the rows kept apart and of a further set."""
    evaluation = {"every": 3, "sets": [{"path": "hard.jsonl", "prompt": "question"}], "best": "eval/hard/reward"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("penstock._pipeline.view.lines.START_S", 0.05)  # less than the start of a fork takes
        return questions.train(f"prepare={questions.module}:ready", evaluation=evaluation)


def test_a_run_leaves_a_model_that_transformers_loads_and_a_summary(ran: Ran, values: dict[str, Any]) -> None:
    summary = ran.summary

    assert summary.steps == 4
    assert summary.ledger["ended"]["trained"] == 4 * 2 * 4
    assert summary.accuracy_before is not None
    assert summary.reward_before is not None
    assert summary.reward_after is not None
    assert json.loads((ran.folder / "summary.json").read_text())["reward_after"] == summary.reward_after
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(summary.checkpoint)
    before: Any = transformers.AutoModelForCausalLM.from_pretrained(values["model"]["path"])
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
    assert PretrainedTokenizer(summary.checkpoint).encode("1+2=")


def test_a_run_says_what_it_does_before_its_first_step_and_prints_its_steps(ran: Ran, questions: Questions) -> None:
    lines = [line.removeprefix("penstock: ") for line in ran.printed.splitlines()]

    model = questions.values["model"]["path"]
    assert lines[:4] == [
        f"calling {questions.module}:ready, which prepares the run",
        f"importing torch and transformers, and reading the tokenizer of {model}",
        "calling each reward function with a first row",
        f"loading the model {model}",
    ]
    assert any(line.startswith("step 0/4, ") for line in lines)
    assert any(line.startswith("step 4/4, ") for line in lines)


def test_a_run_evaluates_the_rows_kept_apart_and_further_sets_and_names_the_best_checkpoint(ran: Ran) -> None:
    evaluated = ran.evaluations()

    assert [line["eval/step"] for line in evaluated] == [0, 3, 4]
    assert evaluated[0]["eval/train/reward"] == pytest.approx(ran.summary.reward_before)
    assert evaluated[2]["eval/train/reward"] == pytest.approx(ran.summary.reward_after)
    best = max(evaluated[1:], key=lambda line: line["eval/hard/reward"])
    assert ran.summary.best == f"run/checkpoints/step-{int(best['eval/step']):08d}"
    assert (ran.folder / "checkpoints" / "best").resolve() == Path(ran.summary.best).resolve()


def test_a_script_with_the_same_stages_and_no_evaluation_trains_to_the_same_weights(
    ran: Ran, questions: Questions
) -> None:
    sys.path.insert(0, str(questions.folder))
    function = getattr(__import__(questions.module), "shorter")  # noqa: B009 (its name depends on the test)
    path = Path(questions.values["model"]["path"])
    torch.manual_seed(0)
    tokenizer = PretrainedTokenizer(path)
    prompts = PromptDataset("train.jsonl", prompt="question", evaluation=4, chat=ChatFormat(tokenizer))
    model = HFModel.from_pretrained(path)
    trainer = TorchTrainer(model, optimizer=partial(adamw, lr=1e-2))

    async def run() -> None:
        async with WeightPublisher(model) as publisher:
            policy = TorchPolicy(partial(HFModel.empty, path), eos_id=tokenizer.eos_id, weights=publisher.url)
            env = SourceEnv(
                prompts,
                policy,
                tokenizer,
                group_size=4,
                sampling=SamplingParams(max_completion_tokens=6),
                concurrency=256,
            )
            pipeline: Pipeline = (
                source(env, on=processes(1), max_lag=0)
                .then(RewardBridge(functions=[trl_reward(function)]))
                .then(AdvantageNormalizer("grpo"))
                .then(Batcher(max_tokens=8192, sequences=8))
                .sink(SinkTrainer(trainer, publisher, max_steps=4))
            )
            await pipeline.run(folder="script")

    anyio.run(run)

    assert equal(ran.weights(), weights_in(Path("script")))


COMMAND = [sys.executable, "-c", "from penstock._cli import main; main()"]


@pytest.mark.long
def test_a_run_with_two_samplers_that_is_killed_is_continued_to_the_same_weights(questions: Questions) -> None:
    samplers = "placement.samplers=2"
    whole = questions.train(samplers, "folder=whole")
    Path("killed.yaml").write_text(json.dumps(questions.values))  # JSON is YAML
    third_step = str(1 + 2 * 2 + 1)  # after the first row that is tried, and the groups of two steps
    with subprocess.Popen(
        [*COMMAND, "run", "killed.yaml", samplers, "folder=killed"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"HELD_AT_CALL": third_step},
    ) as killed:
        assert killed.stdout is not None
        assert killed.stderr is not None
        assert killed.stdout.readline() == "held\n"
        killed.send_signal(signal.SIGKILL)
        printed = killed.stderr.read()

    continued = questions.train(samplers, "folder=killed")

    assert printed.startswith("penstock: reading killed.yaml\n")
    assert re.search("step [0-2]/4", printed)
    assert len(continued.steps()) == 4
    assert equal(whole.weights(), continued.weights())


# -- one step, of two sets ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_step(questions: Questions) -> Ran:
    sets = [{"path": f"{name}.jsonl", "prompt": "question"} for name in ("train", "hard")]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        return questions.train(
            *("algorithm.steps=1", "folder=one_step"),
            view=None,
            data={"sets": sets, "evaluation": 0.25},
            evaluation={"every": 4, "samples": 4},
        )
    finally:
        torch.set_num_threads(before)


def test_a_run_without_a_view_prints_nothing(one_step: Ran) -> None:
    assert one_step.printed == ""


def test_rows_kept_apart_are_evaluated_before_and_after_training_once_by_the_samplers(one_step: Ran) -> None:
    lines, summary = one_step.evaluations(), one_step.summary

    assert [line["eval/step"] for line in lines] == [0, 1]
    for line, accuracy, reward in (
        (lines[0], summary.accuracy_before, summary.reward_before),
        (lines[1], summary.accuracy_after, summary.reward_after),
    ):
        assert line["eval/train/missing"] == line["eval/hard/missing"] == 0
        assert accuracy == pytest.approx((6 * line["eval/train/mean@4"] + 2 * line["eval/hard/mean@4"]) / 8)
        assert reward == pytest.approx((6 * line["eval/train/reward"] + 2 * line["eval/hard/reward"]) / 8)


def test_a_run_leaves_the_number_of_threads_that_train(one_step: Ran) -> None:
    assert one_step.threads == 2


# -- other runs --------------------------------------------------------------------------------------------------------


def test_a_run_whose_rewards_are_all_alike_is_no_success(questions: Questions) -> None:
    values = {
        "data": {"path": "train.jsonl", "prompt": "question"},
        "reward": {"functions": [{"function": f"{questions.module}:always"}]},
    }

    with pytest.raises(NothingTrained, match="no gradient from rewards in 3 steps: rewards: each is 1"):
        questions.train("algorithm.steps=3", "folder=alike", **values)

    summary = json.loads(Path("alike/summary.json").read_text())
    assert summary["nothing_learned"].startswith("no gradient from rewards in 3 steps: rewards: each is 1")
    assert Path(summary["checkpoint"]).is_dir()


def test_an_error_is_one_sentence_without_a_traceback(questions: Questions) -> None:
    broken = questions.values | {"reward": {"functions": [{"function": f"{questions.module}:broken"}]}}
    Path("broken.yaml").write_text(json.dumps(broken))

    status, printed = command_line.ran("run", "broken.yaml", "folder=broken")

    assert status == 1
    assert printed.splitlines()[-1].startswith("penstock: ")
    assert "out of order" in printed.splitlines()[-1]


def test_a_new_folder_has_a_configuration_that_is_checked_and_runs(
    tmp_path: Path, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "reward", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PENSTOCK__MODEL__PATH", str(model_folder("llama")))
    small = ["algorithm.steps=1", "algorithm.prompts=2", "algorithm.group_size=2", "sampling.max_completion_tokens=4"]

    made, _ = command_line.ran("init", "my-run")
    monkeypatch.chdir("my-run")
    checked, printed = command_line.ran("check", "config.yaml")
    ran, result = command_line.ran("run", "config.yaml", *small)
    monkeypatch.delitem(sys.modules, "reward")

    assert (made, checked, ran) == (0, 0, 0), printed + result
    assert "How many" in printed
    assert len(Path("data.jsonl").read_text().splitlines()) == 20
    again, refused = command_line.ran("init", ".")
    assert again == 1
    assert "expected a folder without config.yaml, reward.py, data.jsonl" in refused


@pytest.mark.long
def test_adapters_train_alone_and_are_exported_into_a_whole_model(questions: Questions) -> None:
    summary = questions.train("model.lora={rank: 4}", "folder=adapted").summary

    assert command_line.ran("export", "adapted", "--hf", "merged") == (0, "wrote merged\n")
    assert (Path(summary.checkpoint) / "adapter_model.safetensors").is_file()
    merged = load_file("merged/model.safetensors")
    before = load_file(Path(questions.values["model"]["path"]) / "model.safetensors")
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, merged[name])}
    assert changed
    assert all(name.endswith("proj.weight") for name in changed)


# -- descriptions ------------------------------------------------------------------------------------------------------


def test_an_evaluation_without_rows_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(PenstockError, match="expected rows to evaluate"):
        load_run_config(values, ["evaluation={every: 2}", "data.evaluation=0"])


def test_completions_that_were_cut_are_masked_behind_the_comparison(values: dict[str, Any]) -> None:
    described = describe_run(load_run_config(values, ["algorithm.mask_truncated=true"]))

    assert described.index("AdvantageNormalizer") < described.index("TruncationMask") < described.index("Batcher")


def test_a_sampling_process_which_imports_much_has_minutes_to_start(values: dict[str, Any]) -> None:
    parts = run_parts(load_run_config(values))

    pipeline = parts.pipeline(parts.policy(None), parts.trainer(parts.empty_model(), reference=None), None)

    (sampling, *_) = pipeline.nodes
    assert isinstance(sampling.on, type(processes(1)))
    assert sampling.on.start_timeout_s == 600


def test_a_run_is_described_without_reading_weights(values: dict[str, Any], tmp_path: Path) -> None:
    model = tmp_path / "without-weights"
    model.mkdir()
    for file in Path(values["model"]["path"]).iterdir():
        if file.suffix != ".safetensors":
            (model / file.name).write_bytes(file.read_bytes())

    described = describe_run(load_run_config(values, [f"model.path={model}"]))

    assert "SourceEnv" in described
    assert "SinkTrainer" in described
    assert "parameters" in described
    assert "<|assistant|>" in described  # the first prompt, by the chat template


def test_the_samplers_of_a_run_can_be_actors_of_ray(values: dict[str, Any]) -> None:
    overrides = ["placement.samplers=2", "placement.ray={num_gpus: 0.5, resources: {rack: 1}}"]

    described = describe_run(load_run_config(values, overrides))

    assert "2 actors of Ray, SPREAD, each reserves 1 CPU, 0.5 GPU, 1 rack, at most 1 restart an hour each" in described


def test_a_summary_is_read_as_a_few_lines() -> None:
    summary = Summary(
        accuracy_before=0.33, accuracy_after=0.9, seconds=61.2, steps=60, stop_reason="SinkTrainer returned"
    )

    assert str(summary).splitlines() == [
        "60 steps in 61 s: SinkTrainer returned",
        "accuracy of prompts kept apart: 33.0% before, 90.0% after",
    ]
    assert "learned nothing: rewards: each is 0" in str(Summary(nothing_learned="rewards: each is 0"))
