"""A critic of a model of transformers: its values, and runs with `advantages: gae`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import chdir
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.configured_run import LETTERS, write_run
from tests.letter_model import write_letter_model

from penstock.errors import InvalidConfig, RunDiffers, TokenizersDiffer
from penstock.models import HFModel, LoRA, ValueModel, export
from penstock.runs import RunConfig, Summary, describe_run, load_run_config, train
from penstock.torch import Attention

ModelFolder = Callable[[str], Path]

JUDGED = [
    "algorithm.advantages=gae",
    "algorithm.group_size=1",
    "algorithm.prompts=8",
    "algorithm.max_lag=0",
    "placement.samplers=1",
    "critic.learning_rate=0.01",
]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with chdir(tmp_path):
        yield tmp_path


def config_of(folder: Path, *overrides: str) -> RunConfig:
    return load_run_config(write_run(folder, {}), [*JUDGED, *overrides])


def ran(config: RunConfig) -> Summary:
    return anyio.run(partial(train, config, view=None))


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "kernel"), [("qwen2", "sdpa"), ("llama", "sdpa"), ("gemma 3", "sdpa"), ("gemma 2", "eager")]
)
def test_a_value_model_has_the_hidden_states_of_the_model_in_its_folder(
    family: str, kernel: str, model_folder: ModelFolder
) -> None:
    model = HFModel.from_pretrained(model_folder(family), attention=kernel)
    values = ValueModel.from_pretrained(model_folder(family), attention=kernel)
    tokens = torch.arange(1, 9)[None]
    inputs: dict[str, Any] = {
        "positions": torch.arange(8)[None],
        "attend": Attention.packed(torch.zeros_like(tokens)),
    }

    with torch.no_grad():
        hidden = model(tokens, **inputs, read=lambda states, *_: states)
        found, head = values(tokens, **inputs, read=lambda states, weight, *_: (states, weight))

    torch.testing.assert_close(found, hidden, atol=0, rtol=0)
    assert head.shape == (1, hidden.shape[-1])
    assert head.dtype == torch.float32
    assert not head.any()


def test_a_value_model_with_adapters_is_refused(folder: Path) -> None:
    path = write_letter_model(folder / "model", LETTERS)

    with pytest.raises(InvalidConfig, match="expected a critic without adapters"):
        ValueModel.from_pretrained(path, lora=LoRA(rank=2))


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_run_with_a_critic_and_single_completions_learns(folder: Path) -> None:
    config = config_of(folder, "algorithm.steps=16", "algorithm.prompts=16")

    summary = ran(config)

    steps = steps_of(folder / "run")
    rewards = [step["reward"] for step in steps]
    assert summary.steps == 16
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 2
    assert all(np.isfinite(step["critic/loss"]) for step in steps)
    assert steps[0]["critic/value"] == 0


def test_a_run_that_is_continued_is_that_without_interruption_bit_for_bit(folder: Path) -> None:
    options = ["algorithm.steps=4", "critic.warmup_steps=1", "algorithm.gamma=0.9", "algorithm.gae_lambda=0.8"]
    ran(config_of(folder, *options, f"folder={folder / 'whole'}"))
    ran(config_of(folder, *options, f"folder={folder / 'parts'}", "algorithm.steps=2"))
    ran(config_of(folder, *options, f"folder={folder / 'parts'}"))

    whole, parts = (folder / name / "checkpoints/step-00000004" for name in ("whole", "parts"))
    for name in ("model.safetensors", "critic.tensors", "critic.moments.tensors", "optimizer.tensors"):
        expected, found = load_file(whole / name), load_file(parts / name)
        assert expected.keys() == found.keys()
        for key, tensor in expected.items():
            assert torch.equal(found[key], tensor), (name, key)
    first, second = steps_of(folder / "whole")[:2]
    assert "loss" not in first
    assert "loss" in second
    with pytest.raises(RunDiffers, match=r"algorithm\.gamma"):
        ran(config_of(folder, *options, f"folder={folder / 'parts'}", "algorithm.gamma=0.8"))


def test_a_checkpoint_is_the_model_of_the_policy_and_an_export_leaves_the_critic_out(folder: Path) -> None:
    summary = ran(config_of(folder, "algorithm.steps=1"))

    exported = export(folder / "run", folder / "exported")

    model = HFModel.from_pretrained(summary.checkpoint)
    assert model.module.get_output_embeddings().out_features == len(LETTERS)
    assert not [path.name for path in exported.iterdir() if path.name.startswith("critic")]


def test_a_critic_begins_with_another_model_of_the_same_tokens(folder: Path) -> None:
    other = write_letter_model(folder / "other", LETTERS, width=16, layers=1)
    config = config_of(folder, "algorithm.steps=1", f"critic.model={other}")

    summary = ran(config)

    assert load_file(Path(summary.checkpoint) / "critic.tensors")["lm_head.weight"].shape == (1, 16)


def test_a_critic_that_reads_other_tokens_is_refused(folder: Path) -> None:
    other = write_letter_model(folder / "other", LETTERS[::-1])

    with pytest.raises(TokenizersDiffer, match=r"critic\.model"):
        describe_run(config_of(folder, f"critic.model={other}"))


def test_the_memory_of_a_run_counts_its_critic(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = write_letter_model(folder / "wide", LETTERS, width=256, layers=4)
    values = ValueModel.empty(wide)
    needed = 16 * sum(each.numel() for each in values.parameters())

    described = describe_run(config_of(folder, f"critic.model={wide}"))

    assert f"critic {needed / 2**20:.0f} MiB" in described
    monkeypatch.setattr("penstock._stages.training_run.torch_memory.total_bytes", lambda: needed)
    with pytest.raises(InvalidConfig, match=r"critic \d+ MiB"):
        describe_run(config_of(folder, f"critic.model={wide}"))


def test_the_pipeline_of_a_run_with_a_critic_has_no_stage_that_computes_advantages(folder: Path) -> None:
    described = describe_run(config_of(folder, "algorithm.mask_truncated=true"))

    assert "AdvantageNormalizer" not in described
    assert "TruncationMask" in described
