"""The type of a field decides what the text of an argument, of a variable and of a plain scalar in YAML is."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import InvalidConfig
from penstock.models import LoRA
from penstock.runs import RunConfig, load_run_config

LEAST: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "reward": {}}

FILE = "model: {path: m}\ndata: {path: d.jsonl}\nreward: {}\nsampling: {}\nfolder: run\n"

TEXTS = [
    "Answer after #### please",
    "# Task",
    "You are: a bot",
    "ends with a colon:",
    "[INST]",
    "[INST] Answer [/INST]",
    "{name}",
    "{",
    "@bot",
    "`code`",
    "%s",
    "&anchor",
    "*alias",
    "!tag",
    "!!int 3",
    "|",
    ">",
    "- item",
    "? key",
    "-",
    ",",
    "a, b",
    "---",
    "2026-01-02",
    "2026-01-02T03:04:05",
    "12:30:00",
    "123",
    "010",
    "0x1F",
    "1_000",
    "1e3",
    "1.50",
    ".inf",
    "true",
    "yes",
    "off",
    "=",
    "a=b",
    "<<",
    " spaces around ",
    "two\nlines: of\n# text",
    "a\ttab",
    '"Hello," she said',
    "it's",
    "“quoted”",
    "\\n stays",
    "日本語: 説明",
]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = Path("config.yaml")
    file.write_text(FILE)
    return file


def argument(override: str) -> RunConfig:
    return load_run_config(LEAST, [override])


def value(override: str) -> Any:
    return attrgetter(override.partition("=")[0])(argument(override))


def refusal(*overrides: str) -> str:
    with pytest.raises(InvalidConfig) as refused:
        load_run_config(LEAST, overrides)
    return str(refused.value)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("key", ["data.system", "model.path", "folder"])
def test_a_field_of_text_takes_an_argument_as_it_is(key: str, text: str) -> None:
    assert value(f"{key}={text}") == text


@pytest.mark.parametrize("text", TEXTS)
def test_and_a_variable_of_the_environment(text: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK__DATA__SYSTEM", text)

    assert load_run_config(path).data.system == text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ('data.system="Answer: #1"', "Answer: #1"),
        (r'data.system="two\nlines"', "two\nlines"),
        ("data.system='it''s'", "it's"),
        ('data.system="null"', "null"),
        ("data.system=''", ""),
        ("placement.device=", ""),
        ("data.system=", None),
        ("data.system=null", None),
        ("prepare=null", None),
        ("prepare=null:make", "null:make"),
        ("model.path=null", "null"),
    ],
)
def test_quotes_around_a_whole_text_are_not_a_part_of_it_and_null_is_none_where_a_field_can_be_none(
    override: str, expected: Any
) -> None:
    assert value(override) == expected


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed=010", 10),
        ("seed=0", 0),
        ("seed=+7", 7),
        ("seed= 7 ", 7),
        ("seed=1_000", 1000),
        ("seed=0x10", 16),
        ("seed=0o10", 8),
        ("algorithm.optimizer.lr=1e-5", 1e-5),
        ("algorithm.optimizer.lr=1E-5", 1e-5),
        ("algorithm.optimizer.lr=010", 10.0),
        ("algorithm.optimizer.lr=.5", 0.5),
        ("algorithm.optimizer.lr=1", 1.0),
        ("algorithm.optimizer.max_grad_norm=null", None),
        ("algorithm.optimizer.max_grad_norm=~", None),
        ("sampling.top_k=010", 10),
        ("sampling.top_k=null", None),
        ("data.evaluation=010", 10),
        ("data.evaluation=0.1", 0.1),
        ("data.chat=false", False),
        ("data.chat=False", False),
        ("data.chat=no", False),
        ("data.chat=off", False),
        ("algorithm.mask_truncated=yes", True),
        ("algorithm.clip=[0.2, 010]", (0.2, 10.0)),
        ("algorithm.clip=null", None),
        ("algorithm.preset=null", None),
        ("engine=torch", "torch"),
        ("model.lora={rank: 010, targets: [1, yes]}", LoRA(rank=10, targets=("1", "yes"))),
    ],
)
def test_a_number_a_switch_and_a_section_are_read_as_their_types_are(override: str, expected: Any) -> None:
    assert value(override) == expected


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("sampling.stop=</answer>", ("</answer>",)),
        ("sampling.stop=####", ("####",)),
        ("sampling.stop=a # b", ("a # b",)),
        ("sampling.stop=Question: ", ("Question: ",)),
        ("sampling.stop=123", ("123",)),
        ("sampling.stop=null", ("null",)),
        ('sampling.stop="\\n\\n"', ("\n\n",)),
        ("sampling.stop=[</answer>]", ("</answer>",)),
        ("sampling.stop=[</answer>, 123, yes, 2026-01-02]", ("</answer>", "123", "yes", "2026-01-02")),
        ('sampling.stop=["[/INST]", "#"]', ("[/INST]", "#")),
        ("sampling.stop=[]", ()),
        ("trackers=tensorboard", ("tensorboard",)),
        ("trackers=[tensorboard, wandb]", ("tensorboard", "wandb")),
    ],
)
def test_a_list_of_texts_is_in_brackets_or_is_one_text(override: str, expected: Any) -> None:
    assert value(override) == expected


@pytest.mark.parametrize(
    ("targets", "expected"), [("all-linear", "all-linear"), ("[q_proj, 1]", ("q_proj", "1")), ("123", "123")]
)
def test_a_field_of_a_text_or_a_list_takes_either(targets: str, expected: Any) -> None:
    lora = argument(f"model.lora.targets={targets}").model.lora

    assert lora is not None
    assert lora.targets == expected


@pytest.mark.parametrize(("text", "expected"), [("drop", "drop"), ("-1", -1.0), ("010", 10.0), ("null", None)])
def test_a_field_of_a_name_or_a_number_takes_either(text: str, expected: Any) -> None:
    reward = argument(f"reward.functions=[{{function: 'm:f', on_failure: {text}}}]").reward

    assert reward.functions[0].on_failure == expected


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("pip=[a#b, 010, 1.0, yes, null, true]", ["a#b", 10, 1.0, "yes", None, True]),
        ("working_dir=a #b", "a #b"),
        ("env_vars={A: 010, on: '1'}", {"A": 10, "on": "1"}),
        ("day=2026-01-02", "2026-01-02"),
    ],
)
def test_a_field_of_any_value_takes_decimal_numbers_and_dates_as_text(key: str, expected: Any) -> None:
    ray = argument(f"placement.ray.runtime_env.{key}").placement.ray

    assert ray is not None
    assert ray.runtime_env == {key.partition("=")[0]: expected}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=3 # three", "Expected `int`, got `str` - at `$.seed`"),
        ("seed=1:30", "Expected `int`, got `str` - at `$.seed`"),
        ("seed=2026-01-02", "Expected `int`, got `str` - at `$.seed`"),
        ("seed=1.5", "Expected `int`, got `float` - at `$.seed`"),
        ("seed='3'", "Expected `int`, got `str` - at `$.seed`"),
        ("seed=true", "Expected `int`, got `bool` - at `$.seed`"),
        ("seed=", "Expected `int`, got `null` - at `$.seed`"),
        ("data.chat=1", "Expected `bool`, got `int` - at `$.data.chat`"),
        ("data.chat=maybe", "Expected `bool`, got `str` - at `$.data.chat`"),
        ("model=m", "Expected `object`, got `str` - at `$.model`"),
        ("algorithm.clip=0.2", "Expected `array | null`, got `float` - at `$.algorithm.clip`"),
        ("sampling.stop=[a #, b]", "sampling.stop: expected YAML of plain values"),
        ("data.system=\udcff", "data.system: expected text in UTF-8"),
        ("data.system=\x00", "data.system: expected text in UTF-8"),
    ],
)
def test_a_text_that_is_no_value_of_the_type_is_refused(override: str, message: str) -> None:
    assert message in refusal(override)


@pytest.mark.parametrize(
    "text",
    ["2026-01-02", "12:30:00", "123", "010", "0x1F", "1_000", "1e3", ".inf", "true", "yes", "off", "a:b", "=", "a#b"],
)
def test_a_plain_scalar_of_a_file_is_text_where_the_field_is_of_text(text: str, path: Path) -> None:
    path.write_text(
        f"model: {{path: {text}}}\ndata: {{path: d, system: {text}}}\nreward: {{}}\nsampling: {{stop: [{text}]}}\n"
        f"folder: {text}\n"
    )

    found = load_run_config(path)

    assert (found.model.path, found.data.system, found.sampling.stop, found.folder) == (text, text, (text,), text)


def test_and_a_decimal_number_where_it_is_of_a_number(path: Path) -> None:
    path.write_text(FILE + "seed: 010\nsamples: {every: 0x10}\nalgorithm: {optimizer: {lr: 1e-5, betas: [00.5, .9]}}\n")

    found = load_run_config(path)

    assert (found.seed, found.samples.every) == (10, 16)
    assert (found.algorithm.optimizer.lr, found.algorithm.optimizer.betas) == (1e-5, (0.5, 0.9))


@pytest.mark.parametrize("system", ["null", "~", ""])
def test_null_in_a_file_is_none_where_a_field_can_be_none_and_refused_elsewhere(system: str, path: Path) -> None:
    path.write_text(f"model: {{path: m}}\ndata:\n  path: d\n  system: {system}\nreward: {{}}\n")
    assert load_run_config(path).data.system is None

    path.write_text(f"model:\n  path: {system}\ndata: {{path: d}}\nreward: {{}}\n")
    with pytest.raises(InvalidConfig, match=r"Expected `str`, got `null` - at `\$\.model\.path`"):
        load_run_config(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nseed: 2\n", "expected each key once, got 'seed' in line 6 and in line 7"),
        ("algorithm: {steps: 3}\nalgorithm: {prompts: 4}\n", "expected each key once, got 'algorithm' in line 6"),
        ("algorithm:\n  steps: 3\n  steps: 3\n", "expected each key once, got 'steps' in line 7 and in line 8"),
        ("algorithm: {optimizer: {lr: 1, lr: 1}}\n", "expected each key once, got 'lr' in line 6 and in line 6"),
        ('seed: 1\n"seed": 2\n', "expected each key once, got 'seed'"),
        ("placement: {ray: {runtime_env: {env_vars: {A: 1, A: 2}}}}\n", "expected each key once, got 'A'"),
        ("trackers: [{a: 1, a: 2}]\n", "expected each key once, got 'a'"),
        ("unknown: {a: 1, a: 2}\n", "expected each key once, got 'a'"),
        ("algorithm: {<<: {steps: 1, steps: 2}}\n", "expected each key once, got 'steps'"),
        ("algorithm: {<<: {steps: 1}, <<: {prompts: 2}}\n", "expected each key once, got '<<'"),
        ("on: 1\non: 2\n", "expected each key once, got 'on'"),
        ("[a]: 1\n", "expected text as a key, got a list or a mapping in line 6"),
    ],
)
def test_a_key_that_a_file_gives_twice_is_refused_with_both_lines(text: str, message: str, path: Path) -> None:
    path.write_text(FILE + text)

    with pytest.raises(InvalidConfig) as refused:
        load_run_config(path)

    assert str(refused.value) == f"config: {str(refused.value)[8:]}"
    assert message in str(refused.value)
    assert str(refused.value).endswith(f"(in {path})")
    assert "\n" not in str(refused.value)


def test_a_key_beside_a_merged_one_of_the_same_name_replaces_it(path: Path) -> None:
    path.write_text(
        FILE + "algorithm: &a {steps: 3, prompts: 4}\nevaluation:\n  sets: [{path: e}]\n  sampling: &s {top_k: 3}\n"
    )
    assert load_run_config(path).algorithm.steps == 3

    path.write_text(
        FILE.replace("sampling: {}", "sampling: &s {top_k: 3, stop: [a]}") + "evaluation:\n"
        "  sets: [{path: e}]\n  sampling: {<<: *s, top_k: 5}\n"
    )
    evaluation = load_run_config(path).evaluation

    assert evaluation is not None
    assert evaluation.sampling is not None
    assert (evaluation.sampling.top_k, evaluation.sampling.stop) == (5, ("a",))


def test_a_key_twice_in_an_argument_is_refused() -> None:
    assert "expected each key once, got 'rank'" in refusal("model.lora={rank: 8, rank: 16}")


def test_two_variables_of_one_key_are_refused_with_both_names(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK__SEED", "1")
    monkeypatch.setenv("PENSTOCK__seed", "2")

    with pytest.raises(InvalidConfig, match="expected each key once, got PENSTOCK__SEED and PENSTOCK__seed"):
        load_run_config(path)


def test_of_two_arguments_for_one_key_the_last_one_wins() -> None:
    assert load_run_config(LEAST, ["seed=1", "seed=2"]).seed == 2
