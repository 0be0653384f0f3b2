"""Every key of a RunConfig has a class, which decides what a continued run does where its value has changed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import anyio
import pytest

from penstock._pipeline.durability.run_changes import RunPart, changes_between
from penstock._schemas.config import Config
from penstock._stages.training_run.config_changes import refuse_changes, values_of
from penstock._stages.training_run.key_classes import CLASSES, class_of
from penstock._stages.training_run.replay import RECORDED
from penstock._stages.training_run.run_config import AlgorithmConfig
from penstock.errors import RunDiffers
from penstock.runs import RunConfig, load_run_config, train
from penstock.training import write_checkpoint

DOCS = Path(__file__).parent.parent.parent.parent / "docs"

STEP = 20

SAMPLING: dict[str, Any] = {
    "max_completion_tokens": 8,
    "temperature": 0.9,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "stop": ["end"],
    "stop_ids": [7],
    "greedy": False,
    "keep_support": False,
    "seed": 5,
}

OTHER_SAMPLING: dict[str, Any] = {
    "max_completion_tokens": 9,
    "temperature": 0.8,
    "top_p": 0.8,
    "top_k": 41,
    "min_p": 0.2,
    "repetition_penalty": 1.2,
    "stop": ["stop"],
    "stop_ids": [8],
    "greedy": True,
    "keep_support": True,
    "seed": 6,
}

BASE: dict[str, Any] = {
    "model": {"path": "m", "lora": {"rank": 8, "targets": ["q_proj"]}},
    "data": {"sets": [{"path": "a.jsonl", "weight": 2.0, "name": "a"}, {"path": "b.jsonl"}], "evaluation": 4},
    "reward": {
        "format_markers": [{"marker": "<a>", "reward": 0.1, "closing": "</a>"}, {"marker": "<b>", "reward": 0.1}],
        "length_bounty": {"reward": 0.1, "cap": 1.0},
        "overlong": {"length": 8, "cache": 2},
        "combine": "fallback",
        "right_from": 1.0,
        "clip": [-1, 1],
        "functions": [{"function": "m:f"}],
    },
    "algorithm": {
        "kl": 0.1,
        "adaptive_kl": {"target": 0.1},
        "adaptive_entropy": {"target": 0.1},
        "reference": {"share": 0.5},
        "preset": "trl",
    },
    "sampling": SAMPLING,
    "engine": "vllm",
    "server": {"url": "http://here:1"},
    "placement": {"ray": {"resources": {"a": 1.0}}},
    "evaluation": {"sampling": {**SAMPLING}, "sets": [{"path": "c.jsonl"}]},
}
"""A configuration with every section. One of `JOINED` and `ONE_PATH` replaces what excludes the other keys."""

JOINED: dict[str, Any] = {"placement": {"joining": {}}}

AGENT: dict[str, Any] = {"environment": {"agent": "m:a", "max_calls": 3, "history": "template"}}

GAME: dict[str, Any] = {"environment": {"make": "m:e"}, "data": {}}

PROGRAM: dict[str, Any] = {"environment": {"command": ["agent"]}}

MIXED: dict[str, Any] = {"environment": {"mix": [{"agent": "m:a", "name": "a"}, {"make": "m:e", "weight": 2.0}]}}

MIXED_GAMES: dict[str, Any] = {"environment": {"mix": [{"make": "m:e"}]}, "data": {}}

MIXED_PROGRAMS: dict[str, Any] = {"environment": {"mix": [{"command": ["agent"]}]}}

TASKS: dict[str, Any] = {
    "environment": {"verifiers": {"taskset": "a", "config": {"a": 1}, "client": {"a": 1}}},
    "data": {},
}

MIXED_TASKS: dict[str, Any] = {"environment": {"mix": [TASKS["environment"]]}, "data": {}}

GAE: dict[str, Any] = {"algorithm": {"advantages": "gae"}}

EVALUATED: dict[str, Any] = {
    "evaluation": {"environments": [{"verifiers": {"taskset": "a", "config": {"a": 1}, "client": {"a": 1}}}]}
}

EVALUATED_GAMES: dict[str, Any] = {"evaluation": {"environments": [{"make": "m:e"}]}}

CURRICULUM: dict[str, Any] = {
    "data": {"path": "a.jsonl", "evaluation": 4, "curriculum": {"easy": 0.9}},
    "placement": {"samplers": 2},
}

OTHERS = {
    **{key: {"replay": {"run": "recorded"}} for key in ("replay", "replay.run", "replay.last")},
    **{
        f"evaluation.environments[0].{key}": EVALUATED
        for key in ("verifiers", "verifiers.taskset", "verifiers.config", "verifiers.client", "name")
    },
    "evaluation.environments": EVALUATED,
    **{f"data.curriculum{key}": CURRICULUM for key in ("", ".easy", ".hard", ".revisit")},
    "evaluation.environments[0].make": EVALUATED_GAMES,
    **{f"algorithm.{key}": {"environment": {"agent": "m:a"}} for key in ("rewards", "baseline")},
    **dict.fromkeys(("algorithm.gamma", "algorithm.gae_lambda"), GAE),
    **{f"critic.{key}": GAE for key in ("model", "learning_rate", "warmup_steps", "clip")},
    "placement.python": {"placement": {"samplers": 2}},
    "sampling.keep_support": {"engine": "torch", "server": None},
    **{
        f"placement.servers{key}": {
            "engine": "torch",
            "server": None,
            "placement": {"samplers": 2, "servers": {"vllm": 1, "arguments": ["--seed=1"]}},
        }
        for key in ("", ".vllm", ".tensor_parallel", ".python", ".arguments")
    },
    **{f"environment.verifiers{key}": TASKS for key in ("", ".taskset", ".config", ".client")},
    **{f"environment.mix[0].verifiers{key}": MIXED_TASKS for key in ("", ".taskset", ".config", ".client")},
    "environment.make": GAME,
    "environment.command": PROGRAM,
    "environment.mix[0].make": MIXED_GAMES,
    "environment.mix[0].command": MIXED_PROGRAMS,
}
"""What replaces other keys, by key."""

ONE_PATH: dict[str, Any] = {"data": {"path": "a.jsonl", "evaluation": 4}}

CHANGED: dict[str, Any] = {
    "model.path": "elsewhere",
    "model.precision": "bfloat16",
    "model.base_dtype": "bfloat16",
    "model.head_backward_dtype": "bfloat16",
    "model.attention": "eager",
    "model.gradient_checkpointing": True,
    "model.compile": True,
    "model.lora": None,
    "model.lora.rank": 4,
    "model.lora.alpha": 16,
    "model.lora.dropout": 0.5,
    "model.lora.targets": "all-linear",
    "data.path": "elsewhere.jsonl",
    "data.prompt": "question",
    "data.sets": [{"path": "a.jsonl"}],
    "data.sets[0].path": "elsewhere.jsonl",
    "data.sets[0].weight": 3.0,
    "data.sets[0].prompt": "question",
    "data.sets[0].name": "other",
    "data.chat": False,
    "data.template": {"enable_thinking": False},
    "data.system": "Be brief.",
    "data.evaluation": 0.5,
    "data.max_prompt_tokens": 99,
    "data.curriculum": None,
    "data.curriculum.easy": 0.8,
    "data.curriculum.hard": 0.2,
    "data.curriculum.revisit": 2,
    "reward.format_markers": [],
    "reward.format_markers[0].marker": "<c>",
    "reward.format_markers[0].reward": 0.2,
    "reward.format_markers[0].counted": "each",
    "reward.format_markers[0].closing": None,
    "reward.ordered": True,
    "reward.length_bounty": None,
    "reward.length_bounty.reward": 0.2,
    "reward.length_bounty.cap": 2.0,
    "reward.length_bounty.unit": "character",
    "reward.overlong": None,
    "reward.overlong.length": 9,
    "reward.overlong.cache": 3,
    "reward.overlong.penalty": 2.0,
    "reward.combine": "add",
    "reward.right_from": 0.5,
    "reward.clip": None,
    "reward.functions": [],
    "reward.functions[0].function": "m:g",
    "reward.functions[0].kind": "verl",
    "reward.functions[0].name": "other",
    "reward.functions[0].weight": 2.0,
    "reward.functions[0].concurrency": 3,
    "reward.functions[0].reward_timeout_s": 3.0,
    "reward.functions[0].on_failure": 0.0,
    "environment": None,
    "environment.make": "m:other",
    "environment.agent": "m:other",
    "environment.command": ["other"],
    "environment.verifiers": {"taskset": "b"},
    "environment.verifiers.taskset": "b",
    "environment.verifiers.config": {"a": 2},
    "environment.verifiers.client": {"a": 2},
    "environment.mix[0].verifiers": {"taskset": "b"},
    "environment.mix[0].verifiers.taskset": "b",
    "environment.mix[0].verifiers.config": {"a": 2},
    "environment.mix[0].verifiers.client": {"a": 2},
    "environment.max_calls": 4,
    "environment.max_tokens": 99,
    "environment.mix": [{"agent": "m:a", "name": "a"}],
    "environment.mix[0].make": "m:other",
    "environment.mix[0].agent": "m:other",
    "environment.mix[0].command": ["other"],
    "environment.mix[0].max_calls": 4,
    "environment.mix[0].max_tokens": 99,
    "environment.mix[0].weight": 2.0,
    "environment.mix[0].name": "other",
    "environment.max_length": 99,
    "environment.timeout_s": 9.0,
    "environment.tools": "m:t",
    "environment.tool_calls": "llama",
    "environment.history": "keep",
    "environment.observation_role": "tool",
    "algorithm.advantages": "rloo",
    "algorithm.gamma": 0.9,
    "algorithm.gae_lambda": 0.9,
    "algorithm.rewards": "token",
    "algorithm.baseline": "agent",
    "algorithm.preset": None,
    "algorithm.loss": "gspo",
    "algorithm.clip": [0.1, 0.3],
    "algorithm.aggregation": "prompt-mean",
    "algorithm.kl": 0.2,
    "algorithm.adaptive_kl": None,
    "algorithm.adaptive_kl.target": 0.2,
    "algorithm.adaptive_kl.horizon": 99,
    "algorithm.reference.every": 2,
    "algorithm.reference.share": 0.6,
    "algorithm.entropy": 0.1,
    "algorithm.adaptive_entropy": None,
    "algorithm.adaptive_entropy.target": 0.2,
    "algorithm.adaptive_entropy.delta": 0.1,
    "algorithm.adaptive_entropy.most": 2.0,
    "algorithm.group_size": 4,
    "algorithm.prompts": 16,
    "algorithm.steps": 99,
    "algorithm.updates": 2,
    "algorithm.router_replay": "R3",
    "algorithm.router_aux_loss": 0.1,
    "algorithm.max_lag": 2,
    "algorithm.drop_zero_variance": True,
    "algorithm.mask_truncated": True,
    "algorithm.optimizer.lr": 1e-3,
    "algorithm.optimizer.schedule": "linear",
    "algorithm.optimizer.warmup_steps": 5,
    "algorithm.optimizer.weight_decay": 0.1,
    "algorithm.optimizer.betas": [0.8, 0.9],
    "algorithm.optimizer.max_grad_norm": None,
    "algorithm.optimizer.micro_batch_tokens": 99,
    "critic.model": "elsewhere",
    "critic.learning_rate": 1e-3,
    "critic.warmup_steps": 5,
    "critic.clip": 0.2,
    **{f"sampling.{name}": value for name, value in OTHER_SAMPLING.items()},
    "engine": "sglang",
    "server": {"url": "http://there:2", "model": "n"},
    "server.url": "http://there:2",
    "server.model": "n",
    "server.weights": "w",
    "placement.trainers": 2,
    "placement.servers": {"vllm": 2},
    "placement.servers.vllm": 2,
    "placement.servers.tensor_parallel": 2,
    "placement.servers.python": "other",
    "placement.servers.arguments": [],
    "placement.samplers": 2,
    "placement.python": "other",
    "placement.ray": None,
    "placement.ray.address": "local",
    "placement.ray.num_cpus": 2,
    "placement.ray.num_gpus": 1,
    "placement.ray.resources": {"a": 2.0, "b": 1.0},
    "placement.ray.strategy": "PACK",
    "placement.ray.runtime_env": {"env_vars": {"A": "1"}},
    "placement.ray.placement_timeout_s": 9.0,
    "placement.joining": None,
    "placement.joining.url": "tcp://0.0.0.0:7",
    "placement.joining.weights": "tcp://0.0.0.0:8",
    "placement.joining.key": "k",
    "placement.joining.absence_timeout_s": 9.0,
    "placement.device": "cpu",
    "placement.sampler_device": "cpu",
    "placement.restarts": 7,
    "evaluation": None,
    "evaluation.every": 9,
    "evaluation.samples": 4,
    "evaluation.sampling": None,
    **{f"evaluation.sampling.{name}": value for name, value in OTHER_SAMPLING.items()},
    "evaluation.sets": [],
    "evaluation.sets[0].path": "elsewhere.jsonl",
    "evaluation.sets[0].weight": 2.0,
    "evaluation.sets[0].prompt": "question",
    "evaluation.sets[0].name": "other",
    "evaluation.environments": [{"make": "m:e"}],
    "evaluation.environments[0].make": "m:other",
    "evaluation.environments[0].verifiers": {"taskset": "b"},
    "evaluation.environments[0].verifiers.taskset": "b",
    "evaluation.environments[0].verifiers.config": {"a": 2},
    "evaluation.environments[0].verifiers.client": {"a": 2},
    "evaluation.environments[0].name": "other",
    "evaluation.answer": "m:h",
    "evaluation.best": "eval/a/reward",
    "samples.every": 3,
    "samples.count": 3,
    "trackers": ["tensorboard"],
    "metrics.prometheus": 9090,
    "folder": "moved",
    "checkpoint_every": 3,
    "keep_checkpoints": 3,
    "record": True,
    "replay": None,
    "replay.run": "elsewhere",
    "replay.last": 3,
    "seed": 7,
    "prepare": "m:p",
    "allow_changes": True,
    "skip_damaged": True,
}
"""Another value for every key."""

BESIDE: dict[str, dict[str, Any]] = {"reward.combine": {"reward.right_from": None}}
"""Values that have to change with that of a key."""


def keys_of(config: type[Config], root: str = "") -> Iterator[str]:
    """Yield the keys of a configuration, and its sections that can be null or are lists."""
    hints = get_type_hints(config)
    for name, hint in ((name, hints[name]) for name in config.__struct_fields__):
        key = f"{root}.{name}" if root else name
        sections = [each for each in within(hint) if isinstance(each, type) and issubclass(each, Config)]
        is_list = bool(sections) and get_origin(hint) is tuple
        if not sections or is_list or type(None) in get_args(hint):
            yield key
        for section in sections:
            yield from keys_of(section, f"{key}[]" if is_list else key)


def within(hint: Any) -> Iterator[Any]:
    yield hint
    for inner in get_args(hint):
        yield from within(inner)


def values_for(key: str) -> dict[str, Any]:
    """Return a configuration with `key`, as values."""
    if key.startswith("environment") or key in OTHERS:
        return copy.deepcopy(BASE | OTHERS.get(key, MIXED if "mix" in key else AGENT))
    other = JOINED if key.startswith("placement.joining") else ONE_PATH if key in {"data.path", "data.prompt"} else {}
    return copy.deepcopy(BASE | other)


def changed(key: str) -> dict[str, Any]:
    """Return that configuration with another value of `key`."""
    values = values_for(key)
    for path, value in {key: CHANGED[key], **BESIDE.get(key, {})}.items():
        inner: Any = values
        *parents, last = path.replace("[0]", ".0").split(".")
        for parent in parents:
            inner = inner[int(parent)] if parent == "0" else inner.setdefault(parent, {})
        inner[last] = value
    return values


def started(folder: Path, values: dict[str, Any]) -> RunConfig:
    """Make the folder of a run that was stopped after step `STEP`, and return its configuration."""
    config = load_run_config({"folder": str(folder)} | values)
    folder.mkdir()
    RunPart(values_of(config), []).write(folder, 0)
    write_checkpoint(folder / "checkpoints", STEP, lambda into: (into / "state.json").touch())
    return config


def continued(folder: Path, values: dict[str, Any], **more: Any) -> RunConfig:
    return load_run_config(values | {"folder": str(folder)} | more)


def test_every_key_has_a_class() -> None:
    assert sorted(keys_of(RunConfig)) == sorted(CLASSES)
    assert sorted(key.replace("[0]", "[]") for key in CHANGED) == sorted(CLASSES)


def row_of(section: str, keys: set[str]) -> str:
    """Return the row of the table in docs/resuming.md for the keys of a section."""
    cells = []
    for key_class in ("applied", "free", "refused"):
        names = [key.removeprefix(f"{section}.") for key in CLASSES if key in keys and CLASSES[key] == key_class]
        cells.append(", ".join(f"`{name}`" for name in names))
    return f"| {f'`{section}`' if section else 'the run itself'} | {' | '.join(cells)} |"


def test_the_page_has_the_class_of_every_key() -> None:
    rows = [line for line in (DOCS / "resuming.md").read_text().splitlines() if line.startswith("|")]
    sections = sorted({key.partition(".")[0] for key in CLASSES if "." in key})

    for section in sections:
        assert row_of(section, {key for key in CLASSES if f"{key}.".startswith(f"{section}.")}) in rows
    assert row_of("", {key for key in CLASSES if key.partition(".")[0] not in sections}) in rows


@pytest.mark.parametrize("key", CHANGED)
def test_a_changed_key_is_found_and_refused_or_not_by_its_class(key: str, tmp_path: Path) -> None:
    before = started(tmp_path / "run", values_for(key))
    now = continued(tmp_path / "run", changed(key))

    found = [change for change in changes_between(values_of(before), values_of(now)) if change.key not in BESIDE]

    if key not in {"folder", "allow_changes", "skip_damaged"}:  # a moved folder is the run's; permissions are not
        assert any(f"{change.key}.".startswith((f"{key}.", f"{key}[")) for change in found) or key in BESIDE
    if class_of(key) != "refused":
        refuse_changes(now)
        return
    with pytest.raises(RunDiffers, match=rf"^expected the run in \S+ as it was until step {STEP}, got") as refused:
        refuse_changes(now)
    assert any(f"{key}{end}" in str(refused.value) for end in (": ", "."))
    assert "allow_changes=true" in str(refused.value)
    refuse_changes(continued(tmp_path / "run", changed(key), allow_changes=True))


def test_a_refused_run_has_made_nothing_and_names_both_values(tmp_path: Path) -> None:
    started(tmp_path / "run", BASE)
    made = sorted(tmp_path.rglob("*"))

    with pytest.raises(RunDiffers, match=r"seed: 0 → 3: take another folder") as refused:
        anyio.run(train, continued(tmp_path / "run", BASE, seed=3))

    assert "algorithm" not in str(refused.value)
    assert sorted(tmp_path.rglob("*")) == made


def test_a_folder_without_a_checkpoint_begins_a_run_with_any_values(tmp_path: Path) -> None:
    RunPart(values_of(load_run_config(BASE)), []).write(tmp_path, 0)

    refuse_changes(continued(tmp_path, BASE, seed=3))


def test_keys_that_another_version_had_or_lacks_are_no_difference(tmp_path: Path) -> None:
    config = started(tmp_path / "run", BASE)
    values = values_of(config) | {"gone": 1}
    del values["seed"]
    RunPart(values, []).write(tmp_path / "run", 0)

    refuse_changes(continued(tmp_path / "run", BASE, seed=3))


@pytest.mark.parametrize("now", [{"a": 1, "b": 2}, {"b": 1}, {"a": 2}, {}])
def test_an_argument_of_the_template_that_is_added_removed_or_changed_is_refused(now: Any, tmp_path: Path) -> None:
    values = values_for("data.template")
    values["data"]["template"] = {"a": 1}
    started(tmp_path / "run", values)

    values["data"]["template"] = now
    with pytest.raises(RunDiffers, match=r"data\.template"):
        refuse_changes(continued(tmp_path / "run", values))


TRAINED = {
    *("loss", "clip", "aggregation", "kl", "adaptive_kl", "reference", "entropy", "adaptive_entropy"),
    *("updates", "steps", "optimizer", "router_replay", "router_aux_loss", "gamma", "gae_lambda"),
}
"""Keys of the algorithm that the training of given batches depends on; the last two where there is a critic."""


def test_every_key_of_the_algorithm_is_one_of_the_training_or_part_of_a_recording() -> None:
    recorded = {key.removeprefix("algorithm.") for key in RECORDED if key.startswith("algorithm.")}

    assert recorded | TRAINED == set(AlgorithmConfig.__struct_fields__)
    assert not recorded & TRAINED
