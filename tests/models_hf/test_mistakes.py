"""`penstock check` and `penstock run` answer a mistake in configuration, data or reward with one line."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.command_line import ran

ModelFolder = Callable[[str], Path]

REWARD = """
import json, re, time
import numpy as np

def good(completions, **columns): return [float(len(c)) for c in completions]
def of_column(completions, difficulty, **columns): return [0.0 for c in completions]
def of_verl(data_source, solution_str, ground_truth, extra_info=None): return float(solution_str == ground_truth)
def score(completions, **columns): return [0.0 for c in completions]
def raises(completions, **columns): return [c["no such key"] for c in completions]
def of_no_column(completions, **columns): return [columns["anser"] for c in completions]
def undefined(completions, **columns): return [undefned for c in completions]
def too_few(completions, **columns): return [1.0]
def one(completions, **columns): return 1.0
def none(completions, **columns): pass
def text(completions, **columns): return ["right" for c in completions]
def not_finite(completions, **columns): return [float("inf") for c in completions]
def lists(completions, **columns): return [[1.0] for c in completions]
def mapping(completions, **columns): return [{"value": 1.0} for c in completions]
def positional(a, b, c, d): return [1.0, 1.0]
def no_arguments(): return [1.0, 1.0]
def slow(completions, **columns): time.sleep(1); return [1.0, 1.0]
def exits(completions, **columns): raise SystemExit(3)
def two_lines(completions, **columns): raise ValueError("two\\nlines")
async def late(completions, **columns): raise RuntimeError("late")
def absent(completions, **columns): return [None for c in completions]
def booleans(completions, **columns): return [True for c in completions]
def array(completions, **columns): return np.ones(len(completions))
def generator(completions, **columns): return (1.0 for c in completions)
def of_text(completion): return completion.text.count("4")
def loss(): return 3
def raising_loss(): return 1 / 0
def wants_arguments(config, more): return None
def prepare(config): raise RuntimeError("no network")
number = 3
class Class: pass
def a_set(completions, **columns): return {float(len(c)) for c in completions}
def by_place(completions, **columns): return {place: 1.0 for place, c in enumerate(completions)}
def a_text(completions, **columns): return "10"
class Mute(Exception):
    def __str__(self): raise KeyError
def mute(completions, **columns): raise Mute
"""

MODULES = {
    "syntax": "def good(:\n",
    "needy": "import a_module_that_is_absent\n",
    "wrong_name": "from json import lods\n",
    "fails": "raise KeyError('token')\n",
    "leaves": "import sys; sys.exit(2)\n",
    "tabs": "def good():\n\treturn 1\n        return 2\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_folder: ModelFolder) -> Iterator[Path]:
    """Work in a folder with a configuration, questions and reward functions, and forget what was imported from it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before, handler = set(sys.modules), signal.getsignal(signal.SIGINT)
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "other.jsonl").write_text('{"text": "no question"}\n' * 8)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text('{"question": "1+1=",, "answer": 2}\n' * 8)
    (tmp_path / "table.csv").write_text("question,answer\n" + "1+1=,2\n" * 8)
    (tmp_path / "array.json").write_text(json.dumps(rows))
    (tmp_path / "numbers.jsonl").write_text('{"question": 3}\n' * 8)
    (tmp_path / "blank.jsonl").write_text('{"question": ""}\n' * 8)
    (tmp_path / "rewards.py").write_text(REWARD)
    for name, source in MODULES.items():
        (tmp_path / f"{name}.py").write_text(source)
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump(
            {
                "model": {"path": str(model_folder("qwen2"))},
                "data": {"path": "train.jsonl", "prompt": "question", "evaluation": 4},
                "reward": {"functions": [{"function": "rewards:good"}]},
                "algorithm": {"steps": 2, "prompts": 2, "group_size": 4},
                "sampling": {"max_completion_tokens": 6},
            }
        )
    )
    yield tmp_path
    signal.signal(signal.SIGINT, handler)
    for name in set(sys.modules) - before & {"rewards", *MODULES} | {"rewards", *MODULES}:
        sys.modules.pop(name, None)


def answer(command: str, *arguments: str) -> str:
    """Return the line with which a command ends; empty where it succeeds."""
    status, printed = ran(command, "config.yaml", *arguments)
    begins = printed.rfind("\npenstock: ") + 1
    return "" if status == 0 else printed[begins:].removesuffix("\n")


def function(name: str, **options: Any) -> str:
    text = ", ".join(f"{key}: {value}" for key, value in {"function": f"'{name}'", **options}.items())
    return f"reward.functions=[{{{text}}}]"


MISTAKES: list[tuple[str, str]] = [
    # keys and values
    ("algorithm.stepz=3", "did you mean 'steps'?"),
    ("algoritm.steps=3", "did you mean 'algorithm'?"),
    ("algorithm.steps=many", "at `$.algorithm.steps`"),
    ("algorithm.steps=0", "Expected `int` >= 1, got 0"),
    ("algorithm.steps=1.5", "at `$.algorithm.steps`"),
    ("algorithm.group_size=1", "group_size: expected at least 2 with advantages grpo, which compares them, got 1"),
    ("algorithm.optimizer.lr=0", "at `$.algorithm.optimizer.lr`"),
    ("algorithm.optimizer.lr=-1e-5", "at `$.algorithm.optimizer.lr`"),
    ("algorithm.optimizer.lr=.nan", "at `$.algorithm.optimizer.lr`"),
    ("algorithm.optimizer.lr=.inf", "at `$.algorithm.optimizer.lr`"),
    ("algorithm.optimizer.lr=1e999", "at `$.algorithm.optimizer.lr`"),
    ("algorithm.optimizer.schedule=linera", "did you mean 'linear'?"),
    ("algorithm.optimizer.betas=[0.9]", "at `$.algorithm.optimizer.betas`"),
    ("algorithm.advantages=grop", "did you mean 'grpo'?"),
    ("algorithm={advantages: maxrl, preset: verl}", "config: algorithm.advantages: mode with preset 'verl': expected"),
    ("algorithm={advantages: gdpo, preset: skyrl}", "config: algorithm.advantages: mode with preset 'skyrl': expected"),
    ("algorithm={advantages: gae, preset: verl}", "preset: expected none with gae, whose critic has one formula"),
    ("critic.clip=0.3", "critic: expected"),
    ("record=maybe", "at `$.record`"),
    ("replay={last: 3}", "Object missing required field `run` - at `$.replay`"),
    ("replay={run: absent}", "absent/recording, got none: train that run with record: true"),
    ("replay={run: absent, last: 0}", "Expected `int` >= 1, got 0 - at `$.replay.last`"),
    ("algorithm.preset=vrl", "did you mean 'verl'?"),
    ("algorithm.loss=pppo", "did you mean 'ppo'?"),
    ("algorithm.loss=rewards:loss", "expected algorithm.loss to return a loss of penstock.losses, got int"),
    ("algorithm.loss=rewards:raising_loss", "ZeroDivisionError: division by zero (rewards.py, line 31)"),
    ("algorithm.loss=rewards:wants_arguments", "missing 2 required positional arguments"),
    ("algorithm.loss=rewards:number", "config: algorithm.loss: expected a function, got rewards:number"),
    ("algorithm.clip=[1.5, 0.2]", "config: algorithm.clip"),
    ("algorithm.clip=0.2", "at `$.algorithm.clip`"),
    ("algorithm={loss: sapo, clip: [0.2, 0.2]}", "clip: expected with loss"),
    ("algorithm.reference.share=0.5", "reference: expected a positive kl"),
    ("algorithm.adaptive_kl={target: 0.1}", "adaptive_kl: expected a positive kl"),
    ("algorithm.kl=.nan", "at `$.algorithm.kl`"),
    ("algorithm.entropy=.inf", "at `$.algorithm.entropy`"),
    ("model.precision=fp16", "here it is model.precision=float16"),
    ("model.path=nowhere", "expected the folder of a model at nowhere, got nothing there"),
    ("model.path=train.jsonl", "expected the folder of a model at train.jsonl, got a file"),
    ("model.path=", "at `$.model.path`"),
    ("model.attention=spda", "spda"),
    ("model.lora={rank: 0}", "rank: expected a whole number"),
    ("model.lora={alpha: 0}", "alpha: expected"),
    ("model.lora={dropout: 1}", "dropout: expected"),
    ("model.lora={targets: '['}", "targets: expected names of layers, got '[': unterminated character set"),
    (f"model.lora={{rank: {10**30}}}", "LoRA.rank: expected a whole number below 2**63"),
    ("model.lora={rank: 100000000000}", "rank: expected adapters that fit, got rank 100000000000: "),
    ('data.system="\\ud800"', "data.system: expected text that UTF-8 can hold, without NUL, got '\\ud800' in line 1"),
    ('model="\\ud800"', "model: expected text that UTF-8 can hold"),
    ("model.lora={targets: q_prj}", "expected names of layers, got 'q_prj'"),
    ("model.lora={targets: [q_proj, v_prj]}", "got 'v_prj'; did you mean 'v_proj'?"),
    ("placement.device=gpu", "config: placement.device: expected a device"),
    ("placement.sampler_device=xpu:9", "config: placement.sampler_device: expected a device"),
    ("placement={ray: {}, joining: {}}", "placement: expected either ray or joining"),
    ("engine=vlm", "did you mean 'vllm'?"),
    ("engine=vllm", "engine: expected server"),
    ("server={url: 'http://h:1'}", "engine: expected no server"),
    ("trackers=tensorbord", "did you mean 'tensorboard'?"),
    ("trackers=trakio", "did you mean 'trackio'?"),
    ("metrics={prometheus: 0}", "at `$.metrics.prometheus`"),
    ("metrics={prometheus: 70000}", "at `$.metrics.prometheus`"),
    ("metrics={prometeus: 9090}", "did you mean 'prometheus'?"),
    ("trackers=rewards:loss", "expected rewards:loss to return an object with start"),
    ("trackers=rewards:raising_loss", "ZeroDivisionError"),
    ("sampling.temperature=-1", "temperature: expected"),
    ("sampling.top_p=2", "top_p: expected at most 1"),
    ("sampling.stop=['']", "stop: expected"),
    ("sampling.max_completion_tokens=0", "max_completion_tokens: expected"),
    ("sampling.keep_support=true", "keep_support: expected top_k beside it, the tokens of a support at most, got none"),
    ("prepare=rewards:nothing", "config: prepare: expected a name in rewards"),
    ("prepare=rewards", "at `$.prepare`"),
    ("evaluation={every: 0}", "at `$.evaluation.every`"),
    ("evaluation={answer: 'rewards:no'}", "config: evaluation.answer: expected a name in rewards"),
    (f"seed={10**30}", "at `$.seed`"),
    (f"sampling.max_completion_tokens={10**30}", "max_completion_tokens: expected a whole number below 2**63"),
    (f"algorithm.prompts={10**30}", "at `$.algorithm.prompts`"),
    ("seed=-1", "at `$.seed`"),
    ("seed", "expected key=value"),
    # data
    ("data.path=nowhere.jsonl", "expected a file or a folder at nowhere.jsonl"),
    ("data.path=trian.jsonl", "did you mean 'train.jsonl'?"),
    ("data.path=empty.jsonl", "expected at least one row"),
    ("data.path=table.csv", "table.csv: expected JSON lines or Parquet, got a CSV file"),
    ("data.path=array.json", "array.json: expected JSON lines or Parquet, got a JSON array"),
    ("data.path=broken.jsonl", "broken.jsonl:2: expected one JSON object in a line"),
    ("data.path=other.jsonl", "expected the prompt in column 'question'"),
    ("data.path=numbers.jsonl", "got int"),
    ("data.path=blank.jsonl data.chat=false", "blank: expected prompts of a token or more, got an empty one first"),
    ("data.path=.", "expected a folder that save_to_disk"),
    ("data.prompt=questoin", "set prompt to one of 'question'"),
    ("data.evaluation=16", "expected at least one row for train"),
    ("data.evaluation=1.5", "expected a share below 1 or a whole number of rows"),
    ("data={path: train.jsonl, prompt: question, chat: false, system: x}", "expected none without chat"),
    ("data.sets=[{path: train.jsonl}]", "path: expected either it or sets"),
    ("data={sets: [{path: train.jsonl, prompt: question}, {path: train.jsonl, prompt: question}]}", "'train' twice"),
    ("evaluation={sets: [{path: nowhere.jsonl}]}", "expected a file or a folder at nowhere.jsonl"),
    ("evaluation={sets: [{path: other.jsonl}]}", "expected the prompt in column 'prompt'"),
    # modules and names of rewards
    (function("nowhere:good"), "expected a module that is installed or a file in"),
    (function("rewards:god"), "did you mean 'good'?"),
    (function("rewards.good"), "reward.functions[0].function: expected module:name, for example reward:accuracy"),
    (function("rewards:number"), "expected rewards:number to be a function"),
    (function("rewards:Class"), "expected rewards:Class to be a function"),
    (function("syntax:good"), "SyntaxError: invalid syntax (syntax.py, line 1)"),
    (function("tabs:good"), "(tabs.py, line 3)"),
    (function("needy:good"), "No module named 'a_module_that_is_absent' (needy.py, line 1)"),
    (function("wrong_name:good"), "cannot import name 'lods' from 'json'"),
    (function("fails:good"), "KeyError: 'token' (fails.py, line 1)"),
    (function("leaves:good"), "SystemExit: 2 (leaves.py, line 1)"),
    (function("rewards:good", kind="tlr"), "got 'tlr'"),
    (function("rewards:good", weight=".nan"), "weight: expected a finite number"),
    (function("rewards:good", on_failure="ignore"), "on_failure"),
    (function("rewards:score"), "functions: expected names that differ"),
    ("reward.functions=[{function: 'rewards:good'}, {function: 'rewards:good'}]", "got 'good' again: set name"),
    ("reward.clip=[1, -1]", "clip: expected [low, high]"),
    ("reward.ordered=true", "ordered: expected two markers"),
    # the first call of rewards
    (function("rewards:of_column"), "expected the data to have a column 'difficulty'"),
    (function("rewards:of_verl", kind="verl") + " data.path=other.jsonl data.prompt=text", "column 'ground_truth'"),
    (function("rewards:raises"), "reward.functions[0]: expected raises to return a number, or None, for any"),
    (function("rewards:of_no_column"), "KeyError: 'anser' (rewards.py, line 10)"),
    (function("rewards:undefined"), "NameError: name 'undefned' is not defined (rewards.py, line 11)"),
    (function("rewards:too_few"), "expected 2 values, one for each completion, got 1"),
    (function("rewards:one"), "reward.functions[0]: expected one to return a number"),
    (function("rewards:none"), "reward.functions[0]: expected none to return a number"),
    (function("rewards:text"), "could not convert string to float: 'right'"),
    (function("rewards:not_finite"), "expected a finite number, got inf"),
    (function("rewards:lists"), "reward.functions[0]: expected lists to return a number"),
    (function("rewards:mapping"), "expected a number or a mapping with a"),
    (function("rewards:a_set"), "expected a list with a value for each completion, got set"),
    (function("rewards:by_place"), "expected a list with a value for each completion, got dict"),
    (function("rewards:a_text"), "expected a list with a value for each completion, got str"),
    (function("rewards:mute"), "Mute: its text cannot be made (KeyError)"),
    (function("rewards:positional"), "expected the data to have a column 'a'"),
    (function("rewards:slow", reward_timeout_s=0.1), "expected a value within 0.1 s, got none"),
    (function("rewards:exits"), "SystemExit: 3 (rewards.py, line 22)"),
    (function("rewards:two_lines"), "ValueError: two lines (rewards.py, line 23)"),
    (function("rewards:late"), "RuntimeError: late (rewards.py, line 24)"),
    (function("rewards:good", kind="completion"), "reward.functions[0]: expected good to return a number"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[arguments for arguments, _ in MISTAKES])
@pytest.mark.usefixtures("folder", "one_thread")
def test_check_answers_a_mistake_with_one_line(arguments: str, message: str) -> None:
    overrides = arguments.replace("] data.", "]\0data.").replace("jsonl data.", "jsonl\0data.").split("\0")

    line = answer("check", *overrides)

    assert line.startswith("penstock: ")
    assert message in line
    assert len(line.splitlines()) == 1


BROKEN: list[tuple[str, str | bytes | None, str]] = [
    (
        "config.json",
        '{"model_type": "nothing"}',
        "a model that transformers can make here, got: ValueError: The checkpoint",
    ),
    (
        "config.json",
        '{"model_type": "qwen2", "hidden_size": "wide"}',
        "got: StrictDataclassFieldValidationError: Validation",
    ),
    ("config.json", '{"model_type": "qwen2", "num_attention_heads": 0}', "got: ZeroDivisionError: "),
    ("config.json", '{"model_type": "qwen2", "hidden_act": "nope"}', "got: KeyError: 'nope'"),
    ("config.json", "[]", "config.json: expected a JSON object"),
    ("tokenizer.json", None, "tokenizer.json: expected a tokenizer saved by `save_pretrained(folder)`"),
    (
        "tokenizer_config.json",
        '{"eos_token": 5}',
        "expected an eos_token of the vocabulary, here or in special_tokens_map",
    ),
    ("special_tokens_map.json", "[]", "special_tokens_map.json: expected a JSON object"),
    ("chat_template.jinja", b"\xff{{", "chat_template.jinja: expected text in UTF-8"),
    ("chat_template.jinja", "{% if %}", "expected messages that its chat template takes, got roles user"),
]


@pytest.mark.parametrize("broken", BROKEN, ids=[message for _, _, message in BROKEN])
@pytest.mark.usefixtures("one_thread")
def test_check_answers_a_broken_model_with_one_line(
    broken: tuple[str, str | bytes | None, str],
    folder: Path,
    model_folder: ModelFolder,
) -> None:
    file, content, message = broken
    shutil.copytree(model_folder("qwen2"), folder / "model")
    (folder / "model" / file).unlink(missing_ok=True)
    if content is not None:
        (folder / "model" / file).write_bytes(content if isinstance(content, bytes) else content.encode())

    line = answer("check", "model.path=model")

    assert line.startswith("penstock: ")
    assert message in line
    assert len(line.splitlines()) == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.stepz=3", "did you mean 'steps'?"),
        ("algorithm.loss=rewards:raising_loss", "ZeroDivisionError"),
        ("prepare=rewards:prepare", "RuntimeError: no network (rewards.py, line 33)"),
        ("data.prompt=questoin", "set prompt to one of 'question'"),
        ("algorithm={advantages: gae, preset: verl}", "preset: expected none with gae, whose critic has one formula"),
        (function("rewards:raises"), "reward.functions[0]: expected raises to return a number"),
        (function("rewards:of_column"), "expected the data to have a column 'difficulty'"),
    ],
)
@pytest.mark.usefixtures("one_thread")
def test_run_answers_it_before_the_model_is_read(override: str, message: str, folder: Path) -> None:
    line = answer("run", override)

    assert line.startswith("penstock: ")
    assert message in line
    assert len(line.splitlines()) == 1
    assert not (folder / "run").exists()


@pytest.mark.parametrize("name", ["good", "absent", "booleans", "array", "generator", "no_arguments"])
@pytest.mark.usefixtures("folder", "one_thread")
def test_a_function_with_values_for_the_first_call_is_accepted(name: str) -> None:
    assert answer("check", function(f"rewards:{name}")) == ""


@pytest.mark.usefixtures("one_thread")
def test_a_configuration_is_checked_from_any_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")

    status, _ = ran("check", "../config.yaml")

    assert status == 0
    assert not list((folder / "elsewhere").iterdir())


@pytest.mark.usefixtures("folder", "one_thread")
def test_a_function_of_one_completion_is_called_with_each() -> None:
    assert answer("check", function("rewards:of_text", kind="completion")) == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {path: [}", "expected YAML of plain values"),
        ("- a\n", "Expected `object`, got `list`"),
        ("", "missing required field `model`"),
        ("model: {path: m}\nmodel: {path: n}\n", "expected each key once, got 'model'"),
        ("model: {path: m}\ndata: {path: d}\nreward:\n", "got `null` - at `$.reward`"),
        ("\tmodel: x", "expected YAML of plain values"),
        ("model: {{ path }}", "config: expected text as a key"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_mistake_in_the_file_is_one_line(text: str, message: str) -> None:
    Path("config.yaml").write_text(text)

    line = answer("check")

    assert message in line
    assert len(line.splitlines()) == 1


@pytest.mark.usefixtures("folder")
def test_a_file_that_is_absent_is_one_line() -> None:
    Path("config.yaml").unlink()

    assert answer("check") == "penstock: [Errno 2] No such file or directory: 'config.yaml'"
