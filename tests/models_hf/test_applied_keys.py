"""Every key of the class `applied` has an effect in the run that is continued with another value."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.run_parts import run_parts, value_model

from penstock import Batcher, Pipeline, SinkTrainer, SourceEnv, TrainBatch
from penstock.agents import AgentEnv
from penstock.data import PromptDataset
from penstock.environments import EnvironmentMixture
from penstock.models import HFModel
from penstock.runs import RunConfig, load_run_config
from penstock.testing import batch
from penstock.torch import TorchPolicy, TorchTrainer

pytestmark = pytest.mark.usefixtures("one_thread")

DOCS = Path(__file__).parent.parent.parent / "docs"

STEPS = 4

BASE: dict[str, Any] = {
    "data": {"path": "train.jsonl", "curriculum": {}},
    "reward": {},
    "algorithm": {
        "kl": 0.1,
        "adaptive_kl": {"target": 0.1},
        "adaptive_entropy": {"target": 0.1},
        "reference": {"share": 0.5},
        "optimizer": {"lr": 1e-3, "schedule": "linear", "warmup_steps": 2},
    },
}


class Continued:
    """The parts of a run that was continued from a checkpoint of other values, after one more step."""

    def __init__(self, config: RunConfig, checkpoint: Path, folder: Path) -> None:
        parts = run_parts(config)
        self.model = parts.model()
        trainer = parts.trainer(self.model, parts.reference(self.model), value_model(config))
        self.pipeline: Pipeline = parts.pipeline(parts.policy(None), trainer, None)
        trainer.resume(checkpoint)
        self.metrics = trainer.step(made(9, judged=config.algorithm.has_critic))
        self.trainer = trainer
        kept = torch.load(trainer.save(folder, {}) / "optimizer.pt", weights_only=True)
        self.groups: list[dict[str, Any]] = kept["optimizer"]["param_groups"]

    @property
    def source(self) -> SourceEnv:
        (stage,) = [node.stage for node in self.pipeline.nodes if isinstance(node.stage, SourceEnv)]
        return stage

    @property
    def batcher(self) -> Batcher:
        (stage,) = [node.stage for node in self.pipeline.nodes if isinstance(node.stage, Batcher)]
        return stage

    @property
    def sink(self) -> SinkTrainer:
        (stage,) = [node.stage for node in self.pipeline.nodes if isinstance(node.stage, SinkTrainer)]
        return stage


def option(name: str) -> Callable[[Continued], Any]:
    """Return the function that returns an option which the trainer states."""
    return lambda run: run.trainer.facts().options[name]


def sampling(name: str) -> Callable[[Continued], Any]:
    return lambda run: getattr(run.source.sampling, name)


def prompts(run: Continued) -> PromptDataset:
    assert isinstance(run.source.make_env, PromptDataset)
    return run.source.make_env


def curriculum(name: str) -> Callable[[Continued], Any]:
    return lambda run: getattr(prompts(run).curriculum, name)


def dropout(run: Continued) -> float:
    assert isinstance(run.model, HFModel)
    assert run.model.lora is not None
    return run.model.lora.dropout


def precision(run: Continued) -> Any:
    policy = run.source.policy
    assert isinstance(policy, TorchPolicy)
    return policy.autocast, option("autocast")(run)


def base(run: Continued) -> Any:
    policy = run.source.policy
    assert isinstance(policy, TorchPolicy)
    assert isinstance(policy.make_model, partial)
    return policy.make_model.args[-1]


def agent(name: str, of_mix: str = "") -> Callable[[Continued], Any]:
    """Return the function that returns a bound of the agent, or of one in a mixture."""

    def bound(run: Continued) -> Any:
        made = run.source.make_env
        if of_mix:
            assert isinstance(made, EnvironmentMixture)
            made = made.environments[of_mix][0]
        assert isinstance(made, AgentEnv)
        return getattr(made, name)

    return bound


EFFECTS: dict[str, tuple[Any, Callable[[Continued], Any], Any]] = {
    "model.precision": ("bfloat16", precision, (torch.bfloat16, "torch.bfloat16")),
    "model.base_dtype": ("bfloat16", base, torch.bfloat16),
    "model.head_backward_dtype": ("bfloat16", option("head_backward_dtype"), "torch.bfloat16"),
    "model.lora.dropout": (0.5, dropout, 0.5),
    "data.max_prompt_tokens": (99, lambda run: prompts(run).max_prompt_tokens, 99),
    "data.curriculum.easy": (0.9, curriculum("easy"), 0.9),
    "data.curriculum.hard": (0.1, curriculum("hard"), 0.1),
    "data.curriculum.revisit": (2, curriculum("revisit"), 2),
    "algorithm.clip": ([0.1, 0.3], lambda run: "0.1" in option("loss")(run) and "0.3" in option("loss")(run), True),
    "algorithm.kl": (0.7, lambda run: run.metrics["adaptive_kl/weight"], 0.7),
    "algorithm.adaptive_kl.target": (0.25, lambda run: "target=0.25" in option("loss")(run), True),
    "algorithm.adaptive_kl.horizon": (99, lambda run: "horizon=99" in option("loss")(run), True),
    "algorithm.reference.every": (2, option("reference_updates"), "ReferenceUpdates(every=2, share=0.5)"),
    "algorithm.entropy": (0.1, lambda run: "weight=0.095, delta" in option("loss")(run), True),
    "algorithm.adaptive_entropy.target": (0.25, lambda run: "target=0.25, weight" in option("loss")(run), True),
    "algorithm.adaptive_entropy.delta": (0.125, lambda run: "delta=0.125" in option("loss")(run), True),
    "algorithm.adaptive_entropy.most": (2.5, lambda run: "most=2.5" in option("loss")(run), True),
    "algorithm.group_size": (4, lambda run: (run.source.group_size, run.batcher.sequences), (4, 32 * 4)),
    "algorithm.prompts": (16, lambda run: run.batcher.sequences, 16 * 8),
    "algorithm.steps": (8, lambda run: (run.sink.max_steps, round(run.metrics["lr"], 6)), (8, 667e-6)),
    "algorithm.updates": (2, option("updates"), 2),
    "algorithm.router_replay": ("R2", option("router_replay"), "R2"),
    "algorithm.router_aux_loss": (0.125, option("router_aux_loss"), 0.125),
    "algorithm.max_lag": (3, lambda run: run.pipeline.nodes[0].max_lag, 3),
    "algorithm.drop_zero_variance": (True, lambda run: run.batcher.drop_zero_variance, True),
    "algorithm.mask_truncated": (True, lambda run: "TruncationMask" in run.pipeline.describe(), True),
    "algorithm.optimizer.lr": (1e-2, lambda run: run.metrics["lr"], 1e-2 * 96 / 98),
    "algorithm.optimizer.schedule": ("constant", lambda run: run.metrics["lr"], 1e-3),
    "algorithm.optimizer.warmup_steps": (40, lambda run: run.metrics["lr"], 1e-3 * 4 / 40),
    "algorithm.optimizer.weight_decay": (0.25, lambda run: run.groups[0]["weight_decay"], 0.25),
    "algorithm.optimizer.betas": ([0.5, 0.6], lambda run: run.groups[0]["betas"], (0.5, 0.6)),
    "algorithm.optimizer.max_grad_norm": (0.125, option("max_grad_norm"), 0.125),
    "critic.learning_rate": (0.5, lambda run: run.metrics["critic/lr"], 0.5),
    "critic.warmup_steps": (7, lambda run: "loss" in run.metrics, False),
    "critic.clip": (0.25, lambda run: option("critic")(run)["clip"], 0.25),
    "sampling.max_completion_tokens": (9, sampling("max_completion_tokens"), 9),
    "sampling.temperature": (0.5, lambda run: (sampling("temperature")(run), option("temperature")(run)), (0.5, 0.5)),
    "sampling.top_p": (0.5, sampling("top_p"), 0.5),
    "sampling.top_k": (7, sampling("top_k"), 7),
    "sampling.min_p": (0.5, sampling("min_p"), 0.5),
    "sampling.repetition_penalty": (1.5, sampling("repetition_penalty"), 1.5),
    "sampling.stop": (["end"], sampling("stop"), ("end",)),
    "sampling.stop_ids": ([7], sampling("stop_ids"), (7,)),
    "sampling.greedy": (True, sampling("greedy"), True),
    "sampling.keep_support": (True, sampling("keep_support"), True),
    "environment.max_calls": (3, agent("max_calls"), 3),
    "environment.max_tokens": (99, agent("max_tokens"), 99),
    "environment.max_length": (99, lambda run: run.source.max_length, 99),
    "environment.mix[].max_calls": (3, agent("max_calls", of_mix="answers"), 3),
    "environment.mix[].max_tokens": (99, agent("max_tokens", of_mix="answers"), 99),
}
"""By key: another value, what it has an effect on, and the effect."""


def made(seed: int, *, judged: bool = False) -> TrainBatch:
    """Return a batch, without advantages if a critic is to make them."""
    packed = batch(groups=2, completion_lengths=[3, 5])
    numbers = np.random.default_rng(seed)
    return msgspec.structs.replace(
        packed,
        tokens=numbers.integers(0, 300, len(packed.tokens)).astype(np.int32),
        advantages=None if judged else numbers.standard_normal(len(packed.tokens)).astype(np.float32),
    )


@pytest.fixture(scope="module")
def values(model_folder: Callable[[str], Path]) -> dict[str, Any]:
    return BASE | {"model": {"path": str(model_folder("qwen2"))}}


def trainer_of(config: RunConfig) -> TorchTrainer:
    parts = run_parts(config)
    model = parts.model()
    return parts.trainer(model, parts.reference(model), value_model(config))


@pytest.fixture(scope="module")
def checkpoint(values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    trainer = trainer_of(load_run_config(values))
    for step in range(STEPS):
        trainer.step(made(step))
    return trainer.save(tmp_path_factory.mktemp("before"), {})


def test_every_key_that_the_documentation_calls_applied_has_its_effect_here() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", (DOCS / "resuming.md").read_text(), re.MULTILINE)
    applied = [f"{section}.{key}" for section, keys in rows for key in re.findall(r"`([^`]+)`", keys)]

    assert sorted(EFFECTS) == sorted(applied)


@pytest.fixture(scope="module")
def unchanged(values: dict[str, Any], checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Continued:
    return Continued(load_run_config(values), checkpoint, tmp_path_factory.mktemp("unchanged"))


ALONE = ("model.lora.dropout", "algorithm.steps", "algorithm.optimizer.warmup_steps")
"""Keys that are changed in a run of their own: adapters have another checkpoint, and these decide the rate alone."""

APART = {"algorithm.prompts", "algorithm.optimizer.schedule", "algorithm.adaptive_kl.target", "algorithm.max_lag"}
APART |= {"algorithm.entropy"}
"""Keys whose effects those of other ones would hide."""

AGENTS = tuple(key for key in EFFECTS if key.startswith("environment.") and "[]" not in key)

MIXED = tuple(key for key in EFFECTS if key.startswith("environment.mix[]"))

ROUTED = ("algorithm.router_replay", "algorithm.router_aux_loss")
"""Keys of mixtures of experts."""
CRITIC = tuple(key for key in EFFECTS if key.startswith("critic."))

AGENT = "tests.stages.agents.agent_functions:answers"

BESIDE = {
    ("model.lora.dropout",): ["model.lora={rank: 2}", "algorithm.reference.share=0"],
    CRITIC: ["algorithm.advantages=gae"],
    AGENTS: ["data.curriculum=null", f"environment.agent={AGENT}"],
    MIXED: ["data.curriculum=null", f"environment.mix=[{{agent: '{AGENT}', max_calls: 3, max_tokens: 99}}]"],
}
"""Values without which a key has no place; those of a mixture are given as a whole."""

TOGETHER: list[tuple[str, ...]] = [(key,) for key in ALONE]
TOGETHER += [AGENTS, MIXED, ROUTED, CRITIC, tuple(APART)]
TOGETHER.append(tuple(key for key in EFFECTS if key not in {*ALONE, *AGENTS, *MIXED, *ROUTED, *CRITIC, *APART}))


@pytest.fixture
def bfloat16_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: True)


@pytest.mark.usefixtures("bfloat16_is_fast")
@pytest.mark.parametrize("keys", TOGETHER, ids=lambda keys: keys[0] if len(keys) == 1 else f"{len(keys)} keys")
def test_applied_keys_have_their_effects_in_a_continued_run(
    keys: tuple[str, ...],
    values: dict[str, Any],
    checkpoint: Path,
    unchanged: Continued,
    *,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    beside = BESIDE.get(keys, [])
    if keys == ROUTED:
        values = values | {"model": {"path": str(model_folder("qwen3 moe"))}}
        checkpoint = trainer_of(load_run_config(values)).save(tmp_path / "mixture", {})
    if keys == CRITIC or "model.lora.dropout" in keys:
        checkpoint = trainer_of(load_run_config(values, beside)).save(tmp_path / "others", {})
    changed = [f"{key}={msgspec.json.encode(EFFECTS[key][0]).decode()}" for key in keys if keys != MIXED]

    run = Continued(load_run_config(values, [*beside, *changed]), checkpoint, tmp_path)

    for key in keys:
        _, effect, expected = EFFECTS[key]
        approximate = pytest.approx(expected) if isinstance(expected, float) else expected
        assert effect(run) == approximate, key
        assert beside or effect(unchanged) != approximate, key
