"""A configured run trains a model in a folder on a file of questions, resumes, and makes the objects a script makes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import transformers
from safetensors.torch import load_file

from penstock import AdvantageNormalizer, Batcher, Pipeline, RewardBridge, SinkTrainer, SourceEnv, processes, source
from penstock._cli.samples import samples
from penstock._pipeline.graph.placement import Processes
from penstock._stages.training_run.torch_parts import RunParts
from penstock.chat import ChatFormat
from penstock.data import PromptDataset
from penstock.errors import NothingTrained, PenstockError, RunDiffers
from penstock.models import HFModel
from penstock.policies import PretrainedTokenizer, SamplingParams
from penstock.rewards import trl_reward
from penstock.runs import Summary, describe_run, load_run_config, train
from penstock.torch import TorchPolicy, TorchTrainer, adamw
from penstock.weights import WeightPublisher

REWARD = """
def shorter(completions, **columns):
    return [1 / (1 + len(completion)) for completion in completions]


def broken(completions, **columns):
    raise RuntimeError("out of order")


def always(completions, **columns):
    return [1.0 for completion in completions]
"""

ModelFolder = Callable[[str], Path]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder of a run, with questions and reward functions."""
    rows = [{"question": f"{a}+{b}=", "answer": a + b} for a in range(6) for b in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / f"rewards_of_{tmp_path.name}.py").write_text(REWARD)  # a module is imported once
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def values(folder: Path, model_folder: ModelFolder) -> dict[str, Any]:
    return {
        "model": {"path": str(model_folder("qwen2"))},
        "data": {"path": "train.jsonl", "prompt": "question", "evaluation": 4},
        "reward": {"functions": [{"function": f"rewards_of_{folder.name}:shorter"}]},
        "algorithm": {"steps": 4, "prompts": 2, "group_size": 4, "max_lag": 0, "optimizer": {"lr": 1e-2}},
        "sampling": {"max_completion_tokens": 6},
        "checkpoint_every": 2,
    }


def trained(values: dict[str, Any], *overrides: str) -> Summary:
    return anyio.run(train, load_run_config(values, overrides))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    (newest,) = sorted((folder / "checkpoints").glob("step-*"))[-1:]
    return load_file(newest / "model.safetensors")


def test_a_run_leaves_a_model_that_transformers_loads_and_a_summary(values: dict[str, Any]) -> None:
    summary = trained(values)

    assert summary.steps == 4
    assert summary.ledger["ended"]["trained"] == 4 * 2 * 4
    assert summary.accuracy_before is not None
    assert summary.reward_before is not None
    assert summary.reward_after is not None
    assert json.loads(Path("run/summary.json").read_text())["reward_after"] == summary.reward_after
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(summary.checkpoint)
    before: Any = transformers.AutoModelForCausalLM.from_pretrained(values["model"]["path"])
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
    assert PretrainedTokenizer(summary.checkpoint).encode("1+2=")


def test_a_run_says_what_it_does_before_its_first_step_and_prints_its_steps(
    values: dict[str, Any], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / f"rewards_of_{folder.name}.py").write_text(f"{REWARD}\n\ndef ready(config):\n    pass\n")

    trained(values, f"prepare=rewards_of_{folder.name}:ready")

    lines = [line.removeprefix("penstock: ") for line in capfd.readouterr().err.splitlines()]
    model = values["model"]["path"]
    assert lines[:4] == [
        f"calling rewards_of_{folder.name}:ready, which prepares the run",
        f"importing torch and transformers, and reading the tokenizer of {model}",
        "calling each reward function with a first row",
        f"loading the model {model}",
    ]
    assert any(line.startswith("step 0/4, ") and "start of SourceEnv" in line for line in lines)
    assert any(line.startswith("step 4/4, ") for line in lines)


def test_a_run_without_a_view_prints_nothing(values: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    anyio.run(partial(train, view=None), load_run_config(values, ["algorithm.steps=1"]))

    assert capfd.readouterr() == ("", "")


def test_a_run_whose_rewards_are_all_alike_is_no_success(values: dict[str, Any], folder: Path) -> None:
    values["data"].pop("evaluation")
    values["reward"] = {"functions": [{"function": f"rewards_of_{folder.name}:always"}]}

    with pytest.raises(NothingTrained, match="no gradient from rewards in 3 steps: rewards: each is 1"):
        trained(values, "algorithm.steps=3")

    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["nothing_learned"].startswith("no gradient from rewards in 3 steps: rewards: each is 1")
    assert Path(summary["checkpoint"]).is_dir()
    assert "learned nothing" in str(trained(values, "algorithm.steps=3"))  # it had ended: it does no step


def test_the_summary_counts_the_prompts_of_all_sets_kept_apart(values: dict[str, Any], folder: Path) -> None:
    (folder / "hard.jsonl").write_text("".join(f'{{"question": "{n}+12="}}\n' for n in range(8)))
    sets = [{"path": f"{name}.jsonl", "prompt": "question"} for name in ("train", "hard")]

    summary = trained(values | {"data": {"sets": sets, "evaluation": 0.25}, "evaluation": {"every": 4}})

    first, *_ = (json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines())
    easy, hard = first["eval/train/reward"], first["eval/hard/reward"]
    assert summary.reward_before == pytest.approx((6 * easy + 2 * hard) / 8)


def test_a_run_evaluates_the_rows_kept_apart_and_further_sets_and_names_the_best_checkpoint(
    values: dict[str, Any], folder: Path
) -> None:
    (folder / "hard.jsonl").write_text('{"question": "11+12="}\n')
    sets = [{"path": "hard.jsonl", "prompt": "question"}]

    summary = trained(values | {"evaluation": {"every": 2, "sets": sets, "best": "eval/hard/reward"}})
    trained(values, "folder=without")

    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    evaluated = [line for line in lines if "eval/step" in line]
    assert [line["eval/step"] for line in evaluated] == [0, 2, 4]
    assert evaluated[0]["eval/train/reward"] == pytest.approx(summary.reward_before)
    assert evaluated[2]["eval/train/reward"] == pytest.approx(summary.reward_after)
    best = max(evaluated[1:], key=lambda line: line["eval/hard/reward"])
    assert summary.best == f"run/checkpoints/step-{int(best['eval/step']):08d}"
    assert Path("run/checkpoints/best").resolve() == Path(summary.best).resolve()
    with_it, without = weights_of(Path("run")), weights_of(Path("without"))
    assert all(torch.equal(tensor, without[name]) for name, tensor in with_it.items())


def steps_of(folder: str) -> list[dict[str, float]]:
    """Return the lines of optimizer steps; the evaluation after the last one has a line of its own."""
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def evaluations_of(folder: str) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "eval/step" in line]


def test_rows_kept_apart_are_evaluated_before_and_after_training_once_by_the_samplers(values: dict[str, Any]) -> None:
    summary = trained(values, "placement.samplers=2")

    first, last = evaluations_of("run")
    assert (first["eval/step"], last["eval/step"]) == (0, 4)
    assert first["eval/train/missing"] == last["eval/train/missing"] == 0
    assert (summary.accuracy_before, summary.accuracy_after) == (first["eval/train/mean@1"], last["eval/train/mean@1"])
    assert summary.reward_before == pytest.approx(first["eval/train/reward"])
    assert summary.reward_after == pytest.approx(last["eval/train/reward"])


def test_the_samples_of_a_run_that_is_continued_have_those_of_each_evaluation_once_with_the_right_answer(
    values: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    for steps in (2, 4):
        trained(values | {"samples": {"every": 100, "count": 1}}, f"algorithm.steps={steps}")

    lines = [json.loads(line) for line in Path("run/samples.jsonl").read_text().splitlines()]
    found = [line for line in lines if line["evaluated"] is not None]
    assert [(line["step"], line["evaluated"], line["set"], line["kind"]) for line in found] == [
        (step, evaluated, "train", kind) for step, evaluated in ((1, 0), (2, 2), (4, 4)) for kind in ("best", "worst")
    ]
    answers = {str(json.loads(line)["answer"]) for line in Path("train.jsonl").read_text().splitlines()}
    assert all(line["answer"] in answers for line in found)
    assert all(line["reward"] == line["parts"]["shorter"] for line in found)
    shown = capfd.readouterr().err
    for step in (2, 4):  # at the end of each part; of several within five seconds the last one is shown
        assert f"best of evaluation of step {step}, train: reward" in shown
    samples(Path("run"), best=1)
    printed = capfd.readouterr().out
    assert "step 1, best 1" in printed
    assert "evaluation of step 4, train, best 1" in printed
    assert f"right answer\n  {found[-2]['answer']}" in printed


def test_the_section_says_how_many_completions_the_evaluation_before_and_after_training_has(
    values: dict[str, Any],
) -> None:
    summary = trained(values | {"evaluation": {"every": 3, "samples": 4}})

    lines = evaluations_of("run")
    assert [line["eval/step"] for line in lines] == [0, 3, 4]
    assert summary.accuracy_before == pytest.approx(lines[0]["eval/train/mean@4"])
    assert summary.accuracy_after == pytest.approx(lines[2]["eval/train/mean@4"])


def test_a_run_that_is_continued_keeps_the_accuracy_before_training_and_one_that_was_whole_both(
    values: dict[str, Any],
) -> None:
    first = trained(values, "algorithm.optimizer.schedule=constant", "algorithm.steps=2")
    written = json.loads(Path("run/summary.json").read_text())

    whole = trained(values, "algorithm.optimizer.schedule=constant", "algorithm.steps=2")
    later = trained(values, "algorithm.optimizer.schedule=constant", "algorithm.steps=3")

    assert written["reward_before"] == first.reward_before == later.reward_before
    assert whole.reward_after == first.reward_after
    assert [line["eval/step"] for line in evaluations_of("run")] == [0, 2, 3]
    assert later.reward_after == pytest.approx(evaluations_of("run")[-1]["eval/train/reward"])


def test_an_evaluation_without_rows_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(PenstockError, match="expected rows to evaluate"):
        load_run_config(values, ["evaluation={every: 2}", "data.evaluation=0"])


def test_a_run_leaves_the_number_of_threads_that_train(values: dict[str, Any]) -> None:
    torch.set_num_threads(2)

    trained(values, "placement.samplers=2", "algorithm.steps=1")

    assert torch.get_num_threads() == 2  # also where the evaluation before training is left out, in a continued run


@pytest.mark.long
def test_the_same_command_continues_a_run_to_the_weights_of_one_that_was_not_stopped(
    values: dict[str, Any],
) -> None:
    trained(values, "folder=whole")
    trained(values, "folder=twice", "algorithm.optimizer.schedule=constant", "algorithm.steps=2")

    summary = trained(values, "folder=twice")

    assert summary.steps == 4
    whole, twice = weights_of(Path("whole")), weights_of(Path("twice"))
    assert all(torch.equal(tensor, twice[name]) for name, tensor in whole.items())


def test_a_continued_run_has_the_new_rate_says_so_and_refuses_other_data(
    values: dict[str, Any], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    values = values | {"data": {"path": "train.jsonl", "prompt": "question"}}
    trained(values, "algorithm.steps=2")
    code = folder / f"rewards_of_{folder.name}.py"
    code.write_text(code.read_text() + "\n")

    trained(values, "algorithm.steps=3", "algorithm.optimizer.lr=0.5", "algorithm.optimizer.betas=[0.5, 0.6]")

    printed = [line for line in capfd.readouterr().err.splitlines() if "continued from step 2 with" in line]
    changed = {line.rpartition(" with ")[2].partition(":")[0] for line in printed}
    applied = {f"algorithm.{key}" for key in ("steps", "optimizer.lr", "optimizer.betas")}
    assert changed == {*applied, f"code.{code.stem}"}
    assert [json.loads(line)["lr"] for line in Path("run/metrics.jsonl").read_text().splitlines()] == [1e-2, 1e-2, 0.5]
    rates = [
        json.loads(path.read_bytes())["algorithm"]["optimizer"]["lr"] for path in sorted(Path("run").glob("config*"))
    ]
    assert rates == [1e-2, 0.5]
    (folder / "train.jsonl").write_text('{"question": "1+1="}\n' * 30)
    with pytest.raises(RunDiffers, match=r"SourceEnv\.data\.digest: "):
        trained(values, "algorithm.steps=4", "algorithm.optimizer.lr=0.5")
    with pytest.raises(RunDiffers, match=r"got other values of seed: 0 → 1: "):
        trained(values, "seed=1")


def test_a_script_with_the_same_stages_trains_to_the_same_weights(values: dict[str, Any], folder: Path) -> None:
    trained(values)

    sys.path.insert(0, str(folder))
    function = getattr(__import__(f"rewards_of_{folder.name}"), "shorter")  # noqa: B009 (its name depends on the test)
    path = Path(values["model"]["path"])
    torch.manual_seed(0)
    tokenizer = PretrainedTokenizer(path)
    prompts = PromptDataset("train.jsonl", prompt="question", evaluation=4, chat=ChatFormat(tokenizer))
    model = HFModel.from_pretrained(path)
    trainer = TorchTrainer(model, optimizer=partial(adamw, lr=1e-2), tokenizer=tokenizer)

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
                .then(RewardBridge(tokenizer=tokenizer, functions=[trl_reward(function)]))
                .then(AdvantageNormalizer("grpo"))
                .then(Batcher(max_tokens=8192, sequences=8))
                .sink(SinkTrainer(trainer, publisher, max_steps=4))
            )
            await pipeline.run(folder="script")

    anyio.run(run)

    configured, scripted = weights_of(Path("run")), weights_of(Path("script"))
    assert all(torch.equal(tensor, scripted[name]) for name, tensor in configured.items())


@pytest.mark.long
def test_adapters_train_alone_and_are_exported_into_a_whole_model(values: dict[str, Any]) -> None:
    summary = trained(values, "model.lora={rank: 4}")

    ran = subprocess.run([*COMMAND, "export", "run", "--hf", "merged"], capture_output=True, text=True, check=True)

    assert ran.stdout == "wrote merged\n"
    assert (Path(summary.checkpoint) / "adapter_model.safetensors").is_file()
    merged = load_file("merged/model.safetensors")
    before = load_file(Path(values["model"]["path"]) / "model.safetensors")
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, merged[name])}
    assert changed
    assert all(name.endswith("proj.weight") for name in changed)


@pytest.mark.long
def test_a_reference_makes_the_kl_to_the_model_before_training(values: dict[str, Any]) -> None:
    trained(values, "algorithm.kl=0.1")

    kl = [line["ref_kl"] for line in steps_of("run")]
    assert kl[0] == pytest.approx(0, abs=1e-4)
    assert kl[-1] > 1e-4


ALGORITHM = (
    "algorithm.loss=dppo",
    "algorithm.advantages=maxrl",
    "algorithm.aggregation=prompt-mean",
    "algorithm.kl=0.1",
    "algorithm.adaptive_kl={target: 0.001, horizon: 50}",
    "algorithm.optimizer.schedule=constant",
    "reward.overlong={length: 12, cache: 12, penalty: 0.1}",
)


@pytest.mark.long
def test_the_weight_of_a_divergence_goes_on_in_a_continued_run(values: dict[str, Any]) -> None:
    trained(values, *ALGORITHM, "algorithm.steps=2")
    trained(values, *ALGORITHM, "algorithm.steps=3")

    steps = steps_of("run")
    weights = [step["adaptive_kl/weight"] for step in steps]
    errors = [min(max(step["adaptive_kl/kl"] / 0.001 - 1, -0.2), 0.2) for step in steps]
    assert weights[0] == 0.1
    assert weights[1:] == pytest.approx([w * (1 + e * 8 / 50) for w, e in zip(weights, errors, strict=True)][:-1])
    assert len(set(weights)) == 3
    assert "rewards/overlong" in steps[0]


def test_completions_that_were_cut_are_masked_behind_the_comparison(values: dict[str, Any]) -> None:
    described = describe_run(load_run_config(values, ["algorithm.mask_truncated=true"]))

    assert described.index("AdvantageNormalizer") < described.index("TruncationMask") < described.index("Batcher")


def test_a_sampling_process_which_imports_much_has_minutes_to_start(values: dict[str, Any]) -> None:
    parts = RunParts(load_run_config(values))

    pipeline = parts.pipeline(parts.policy(None), parts.trainer(parts.empty_model(), reference=None), None)

    (sampling, *_) = pipeline.nodes
    assert isinstance(sampling.on, Processes)
    assert sampling.on.start_timeout_s == 600


def test_a_run_is_described_without_reading_weights(values: dict[str, Any], folder: Path) -> None:
    model = folder / "without-weights"
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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.prompt=questoin", "set prompt to one of 'question'"),
        ("reward.functions=[{function: 'nowhere:f'}]", "expected a module that is installed or a file in"),
        ("reward.functions=[{function: 'MODULE:short'}]", "did you mean 'shorter'"),
        ("model.path=nowhere", "nowhere"),
        ("model.attention=spda", 'Specified `attn_implementation="spda"` is not supported'),
        ("model.lora={targets: [q_proj, v_prj]}", "got 'v_prj'; did you mean 'v_proj'?"),
        ("model.lora={targets: q_prj}", "LoRA.targets: expected names of layers, got 'q_prj'"),
        ("algorithm.clip=[1.5, 0.2]", "config: algorithm.clip: expected 0 < clip_low < 1"),
        ("placement.device=gpu", "config: placement.device: expected a device that torch finds here"),
        ("placement.sampler_device=xpu:9", "config: placement.sampler_device: expected a device"),
        ("trackers=['builtins:dict']", "config: trackers: expected builtins:dict to return an object with start"),
    ],
)
def test_a_mistake_is_found_before_weights_are_read(
    override: str, message: str, values: dict[str, Any], folder: Path
) -> None:
    config = load_run_config(values, [override.replace("MODULE", f"rewards_of_{folder.name}")])

    with pytest.raises(PenstockError) as refused:
        describe_run(config)

    assert message in str(refused.value)


# -- commands ----------------------------------------------------------------------------------------------------------

COMMAND = [sys.executable, "-c", "from penstock._cli import main; main()"]


def config_file(values: dict[str, Any]) -> str:
    Path("config.yaml").write_text(json.dumps(values))  # JSON is YAML
    return "config.yaml"


@pytest.mark.long
def test_the_command_trains_prints_the_steps_and_the_result(values: dict[str, Any]) -> None:
    ran = subprocess.run(
        [*COMMAND, "run", config_file(values), "algorithm.steps=2"], capture_output=True, text=True, check=True
    )

    assert ran.stderr.startswith("penstock: reading config.yaml\n")
    assert "step 2/2" in ran.stderr
    assert "2 steps in" in ran.stdout
    assert "accuracy of prompts kept apart" in ran.stdout


def test_a_run_with_two_samplers_that_is_killed_is_continued_to_the_same_weights(values: dict[str, Any]) -> None:
    config = config_file(values | {"placement": {"samplers": 2}})
    subprocess.run([*COMMAND, "run", config, "folder=whole"], capture_output=True, check=True)
    killed = subprocess.Popen([*COMMAND, "run", config, "folder=killed"], stderr=subprocess.PIPE, text=True)
    with killed:
        assert killed.stderr is not None
        next(line for line in killed.stderr if "step" in line)
        killed.send_signal(signal.SIGKILL)

    subprocess.run([*COMMAND, "run", config, "folder=killed"], capture_output=True, check=True)

    whole, continued = weights_of(Path("whole")), weights_of(Path("killed"))
    assert all(torch.equal(tensor, continued[name]) for name, tensor in whole.items())


def test_a_new_folder_has_a_configuration_that_is_checked_and_runs(
    folder: Path, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run([*COMMAND, "init", "my-run"], check=True, capture_output=True)
    monkeypatch.chdir(folder / "my-run")
    small = ["algorithm.steps=1", "algorithm.prompts=2", "algorithm.group_size=2", "sampling.max_completion_tokens=4"]
    monkeypatch.setenv("PENSTOCK__MODEL__PATH", str(model_folder("llama")))

    checked = subprocess.run([*COMMAND, "check", "config.yaml"], capture_output=True, text=True, check=True)
    ran = subprocess.run([*COMMAND, "run", "config.yaml", *small], capture_output=True, text=True, check=False)

    assert "How many" in checked.stdout
    assert ran.returncode == 0, ran.stderr
    assert len(Path("data.jsonl").read_text().splitlines()) == 20
    again = subprocess.run([*COMMAND, "init", "."], capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "expected a folder without config.yaml, reward.py, data.jsonl" in again.stderr


def test_an_error_is_one_sentence_without_a_traceback(values: dict[str, Any], folder: Path) -> None:
    function = f"rewards_of_{folder.name}:broken"
    ran = subprocess.run(
        [*COMMAND, "run", config_file(values), f"reward.functions=[{{function: '{function}'}}]"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
    )

    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].startswith("penstock: ")
    assert "out of order" in ran.stderr.splitlines()[-1]


def test_a_summary_is_read_as_a_few_lines() -> None:
    summary = Summary(
        accuracy_before=0.33, accuracy_after=0.9, seconds=61.2, steps=60, stop_reason="SinkTrainer returned"
    )

    assert str(summary).splitlines() == [
        "60 steps in 61 s: SinkTrainer returned",
        "accuracy of prompts kept apart: 33.0% before, 90.0% after",
    ]
    assert "learned nothing: rewards: each is 0" in str(Summary(nothing_learned="rewards: each is 0"))
