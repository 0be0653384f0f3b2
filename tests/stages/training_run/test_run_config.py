"""A configuration is a file, changed by the environment and by arguments; a mistake is reported with its path."""

from __future__ import annotations

import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import InvalidConfig
from penstock.models import LoRA
from penstock.runs import RunConfig, load_run_config

DOCS = Path(__file__).parent.parent.parent.parent / "docs"

LEAST: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "reward": {}}


def refusal(*overrides: str, **values: Any) -> str:
    with pytest.raises(InvalidConfig) as refused:
        load_run_config(LEAST | values, overrides)
    return str(refused.value)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = Path("config.yaml")
    file.write_text("model: {path: m}\ndata: {path: d.jsonl}\nreward: {clip: [-1, 1]}\nseed: 1\n")
    return file


def test_the_configuration_beside_a_script_of_trl_is_one(tmp_path: Path) -> None:
    block = re.search(r"^```yaml\n(.*?)^```$", (DOCS / "coming-from.md").read_text(), re.MULTILINE | re.DOTALL)
    assert block
    (tmp_path / "config.yaml").write_text(block[1])

    config = load_run_config(tmp_path / "config.yaml")

    assert (config.algorithm.optimizer.lr, config.data.chat) == (1e-6, False)


def test_a_file_and_a_mapping_with_the_same_values_are_the_same_configuration(path: Path) -> None:
    of_file = load_run_config(path)

    assert of_file == load_run_config(LEAST | {"reward": {"clip": [-1, 1]}, "seed": 1})
    assert isinstance(of_file, RunConfig)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed=3", 3),
        ("model.path=./other", "./other"),
        ("algorithm.optimizer.lr=1e-5", 1e-5),
        ("algorithm.clip=[0.2, 0.28]", (0.2, 0.28)),
        ("model.lora={rank: 4}", LoRA(rank=4)),
        ("algorithm.optimizer.max_grad_norm=null", None),
        ("data.system=a=b", "a=b"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_argument_changes_one_value(override: str, expected: Any, path: Path) -> None:
    changed = load_run_config(path, [override])

    assert attrgetter(override.partition("=")[0])(changed) == expected


def test_the_environment_changes_a_file_and_arguments_change_both(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK__MODEL__PATH", "from-environment")
    monkeypatch.setenv("PENSTOCK__SEED", "2")

    found = load_run_config(path, ["seed=3"])

    assert (found.model.path, found.seed) == ("from-environment", 3)


def test_the_environment_does_not_change_a_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK__SEED", "2")

    assert load_run_config(LEAST).seed == 0


def test_overrides_leave_the_given_mapping_as_it_is() -> None:
    load_run_config(LEAST, ["model.path=other"])

    assert LEAST["model"]["path"] == "m"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.stepz=3", "unknown field `stepz` - at `$.algorithm`; did you mean 'steps'?"),
        ("algoritm.steps=3", "unknown field `algoritm`; did you mean 'algorithm'?"),
        ("algorithm.optimizer.Lr=3", "unknown field `Lr` - at `$.algorithm.optimizer`; did you mean 'lr'?"),
        ("algorithm.steps=many", "Expected `int`, got `str` - at `$.algorithm.steps`"),
        ("algorithm.steps=0", "Expected `int` >= 1, got 0 - at `$.algorithm.steps`"),
        (
            "algorithm={loss: my:loss, entropy: 0.01}",
            "loss: expected neither entropy, adaptive_entropy, adaptive_kl nor aggregation beside my:loss",
        ),
        (
            "algorithm.loss=pppo",
            "cispo, dppo, clip_cov, kl_cov, sapo, vespo, reinforce, sft or module:function, got 'pppo'; did",
        ),
        ("prepare=print", ", got 'print' - at `$.prepare`"),
        ("algorithm.advantages=grop", "got 'grop' - at `$.algorithm.advantages`; did you mean 'grpo'?"),
        ("algorithm.optimizer.schedule=linera", "cosine_with_restarts, polynomial, inverse_sqrt, got 'linera'"),
        (
            "algorithm.optimizer.betas=[0.9, 1.5]",
            "Expected `float` < 1.0, got 1.5 - at `$.algorithm.optimizer.betas[1]`",
        ),
        ("algorithm.reference.share=0.5", "reference: expected a positive kl beside a share, got none"),
        ("engine=vlm", "Expected one of torch, vllm, sglang, got 'vlm' - at `$.engine`; did you mean 'vllm'?"),
        ("reward.functions=[{function: 'm:f', kind: tlr}]", "Expected one of trl, verl, completion, got 'tlr'"),
        ("engine=vllm", "engine: expected server: {url: http://host:port} with engine vllm, got none"),
        ("data.path=''", "path: expected either it or sets"),
        ("seed", "expected key=value, for example model.path=./model, got 'seed'"),
        ("seed.more=1", "Expected `int`, got `object` - at `$.seed`"),
        ("model.path.more=1", "expected a mapping at model.path for model.path.more, got 'm'"),
        ("algorithm.clip=[", "algorithm.clip: expected YAML of plain values"),
    ],
    ids=str,
)
def test_a_mistake_is_reported_with_its_path(override: str, message: str) -> None:
    assert message in refusal(override)


def test_code_is_named_and_never_written_into_the_file(path: Path) -> None:
    path.write_text("model: {path: m}\ndata: {path: d.jsonl}\nreward: {}\nprepare: !!python/name:os.system\n")

    with pytest.raises(InvalidConfig, match="expected YAML of plain values"):
        load_run_config(path)


@pytest.mark.parametrize("reward", [{"clip": [-1, 1]}, {"combine": "fallback"}], ids=["clip", "fallback"])
def test_gdpo_compares_parts_of_rewards_which_nothing_corrects(reward: dict[str, Any]) -> None:
    assert refusal("algorithm.advantages=gdpo", reward=reward) == (
        "config: algorithm.advantages: expected neither reward.clip nor combine: fallback with gdpo, which compares "
        "the parts of rewards"
    )
    assert load_run_config(LEAST, ["algorithm.advantages=gdpo"]).algorithm.advantages == "gdpo"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.group_size=1"], "group_size: expected at least 2 with advantages grpo"),
        (["algorithm.gamma=0.9"], r"gamma: expected 1 but with reinforce\+\+, gae or baseline turn, got 0.9 with grpo"),
        (["algorithm.gae_lambda=0.9"], "gae_lambda: expected 1 but with gae, got 0.9 with grpo"),
        (["algorithm.advantages=gae", "algorithm.preset=verl"], "preset: expected none with gae"),
        (["algorithm.advantages=gae", "algorithm.drop_zero_variance=true"], "drop_zero_variance: expected false with"),
        (["critic.clip=0.2"], "critic: expected algorithm.advantages gae beside it, got grpo"),
        (["algorithm.loss=sft", "algorithm.advantages=gae"], "algorithm.advantages: expected none beside"),
        (["algorithm.loss=sft", "algorithm.gae_lambda=0.9"], "gae_lambda: expected 1"),
        (["algorithm.loss=sft", "record=true"], "record: expected none beside algorithm.loss sft"),
        (["algorithm.loss=sft", "replay={run: r}"], "algorithm.loss: expected one of sampled completions in a replay"),
        (["record=true", "replay={run: r}"], "record: expected false in a replay"),
    ],
)
def test_what_does_not_fit_the_advantages_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        load_run_config(LEAST, overrides)


@pytest.mark.parametrize("advantages", ["gae", "reinforce++", "batch", "global", "none"])
def test_single_completions_are_possible_with_advantages_that_compare_none_of_a_prompt(advantages: str) -> None:
    config = load_run_config(LEAST, [f"algorithm.advantages={advantages}", "algorithm.group_size=1"])

    assert config.algorithm.sequences == config.algorithm.prompts
