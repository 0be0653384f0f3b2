"""Sequences beyond the tables of a model: longer than its positions, or of other tokens. Refused by both numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from anyio import to_thread
from structlog.testing import capture_logs

from penstock import TrainBatch, Worker
from penstock.errors import InvalidConfig, InvalidRecord
from penstock.losses import KL, PPOClip
from penstock.models import HFModel
from penstock.policies import SamplingParams
from penstock.runs import RunConfig, describe_run, load_run_config, train
from penstock.testing import batch, drive, group
from penstock.torch import Critic, TorchPolicy, TorchReference, TorchTrainer

ModelFolder = Callable[[str], Path]

pytestmark = pytest.mark.usefixtures("one_thread")

POSITIONS = 24

GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": POSITIONS}

WITH_TABLES: dict[str, tuple[str, dict[str, Any]]] = {
    "learned": ("GPT2", GPT),
    "learned, with an offset": (
        "OPT",
        {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "ffn_dim": 32,
            "word_embed_proj_dim": 32,
            "max_position_embeddings": POSITIONS,
        },
    ),
    "computed once": ("GPTJ", GPT | {"rotary_dim": 8}),
}
"""By the kind of table: the class, and its arguments."""


@pytest.fixture(scope="module", params=WITH_TABLES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    made = tmp_path_factory.mktemp("tables")
    name, options = WITH_TABLES[request.param]
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = getattr(transformers, f"{name}Config")(vocab_size=320, **ids, **options)
    auto: Any = transformers.AutoModelForCausalLM
    auto.from_config(config).save_pretrained(made)
    for file in tokenizer_folder.iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    return made


def kernel(folder: Path) -> str:
    """Return the kernel that transformers has for the model: GPT-J has but one."""
    return "eager" if json.loads((folder / "config.json").read_text())["model_type"] == "gptj" else "sdpa"


def model(folder: Path) -> HFModel:
    return HFModel.from_pretrained(folder, attention=kernel(folder))


async def sample(folder: Path, prompt: int, completion: int) -> list[int]:
    """Return the number of tokens of each completion of a short prompt and of one of `prompt` tokens."""
    policy = TorchPolicy(partial(model, folder), eos_id=319)
    given = [np.ones(2, np.int32), np.ones(prompt, np.int32)]
    sampling = SamplingParams(max_completion_tokens=completion)
    async with policy.open(Worker()) as engine:
        return [len(each.tokens) for each in await engine.generate(given, sampling)]


async def test_an_engine_samples_to_the_last_position_and_refuses_more_by_the_prompt(folder: Path) -> None:
    assert max(await sample(folder, POSITIONS - 9, 9)) <= 9
    with pytest.raises(
        InvalidConfig, match=r"prompt 1: expected at most 24 tokens.*got 15 and max_completion_tokens=10"
    ):
        await sample(folder, POSITIONS - 9, 10)


def trained(folder: Path, packed: TrainBatch) -> dict[str, float]:
    trainer = TorchTrainer(model(folder), optimizer=torch.optim.SGD)
    return trainer.step(msgspec.structs.replace(packed, tokens=packed.tokens % 300))


def test_a_trainer_names_the_sequence_that_has_more_tokens_than_positions(folder: Path) -> None:
    lengths = {"completion_lengths": [3, POSITIONS - 2], "advantages": np.ones(POSITIONS + 5)}

    assert trained(folder, batch(groups=1, **lengths))["grad_norm"] > 0
    with pytest.raises(
        InvalidRecord, match="test/1: repetition 1: expected at most 24 tokens, the positions of the model, got 25"
    ):
        trained(folder, TrainBatch.pack([group(instance_id="0"), group(instance_id="1", completion_lengths=[3, 23])]))


async def test_a_reference_names_it_too(folder: Path) -> None:
    with pytest.raises(InvalidRecord, match=r"sequence 1: expected at most 24 tokens.*got 25"):
        await drive(TorchReference(partial(model, folder)), [group(completion_lengths=[3, 23])])


@pytest.mark.parametrize("role", ["policy", "critic", "reference"])
def test_a_trainer_names_the_sequence_that_has_a_token_without_an_embedding(folder: Path, role: str) -> None:
    other = model(folder)
    other.module.resize_token_embeddings(50)
    roles: dict[str, Any] = {"reference": other, "critic": Critic(model=other, optimizer=torch.optim.SGD)}
    given = {role: roles[role]} if role in roles else {}
    loss = PPOClip() + 0.1 * KL("k3") if role == "reference" else PPOClip()
    trainer = TorchTrainer(model(folder) if given else other, optimizer=torch.optim.SGD, loss=loss, **given)
    packed = batch(
        groups=2, completion_lengths=[3], prompt_length=1, advantages=None if role == "critic" else np.ones(4)
    )
    tokens = np.arange(44, 52, dtype=np.int32)

    with pytest.raises(InvalidRecord, match=r"test/1: repetition 0: expected tokens below 50, the vocabulary .*got 50"):
        trainer.step(msgspec.structs.replace(packed, tokens=tokens))


def test_a_trainer_names_the_support_with_a_token_without_an_embedding(folder: Path) -> None:
    other = model(folder)
    packed = batch(groups=1, completion_lengths=[2, 2], prompt_length=1, advantages=np.ones(6))
    support = np.array([[-1, -1], [1, 2], [1, 2], [-1, -1], [1, 2], [1, 2**31 - 1]], np.int32)
    given = msgspec.structs.replace(packed, tokens=np.ones(6, np.int32), support_ids=support)

    with pytest.raises(
        InvalidRecord, match=rf"repetition 1: expected support_ids below {other.vocabulary}, .*2147483647"
    ):
        TorchTrainer(other, optimizer=torch.optim.SGD).step(given)


async def test_a_stage_of_a_reference_names_it_too(folder: Path) -> None:
    with pytest.raises(InvalidRecord, match=r"sequence 0: expected tokens below \d+, the vocabulary .*got 100000"):
        await drive(
            TorchReference(partial(model, folder)),
            [group(completion_lengths=[2], prompt_length=1, tokens=np.array([1, 2, 100_000], np.int32))],
        )


def configured(folder: Path, rows: Path, *overrides: str) -> RunConfig:
    rows.write_text('{"prompt": "how many"}\n' * 8)
    values = {
        "model": {"path": str(folder), "attention": kernel(folder)},
        "data": {"path": str(rows)},
        "reward": {},
        "folder": str(rows.parent),
    }
    bounds = ["data.chat=false", "data.max_prompt_tokens=20", "data.evaluation=2", "sampling.max_completion_tokens=4"]
    return load_run_config(values, [*bounds, "algorithm={prompts: 2, group_size: 2, steps: 1}", *overrides])


async def described(config: RunConfig) -> None:
    await to_thread.run_sync(describe_run, config)


@pytest.mark.parametrize(
    ("override", "sum_of"),
    [
        ("sampling.max_completion_tokens=5", r"sampling.max_completion_tokens: .* 20 \+ 5 = 25"),
        ("data.max_prompt_tokens=21", r"sampling.max_completion_tokens: .* 21 \+ 4 = 25"),
        (
            "evaluation={every: 1, sampling: {max_completion_tokens: 30}}",
            r"evaluation.sampling.max_completion_tokens: .* 20 \+ 30 = 50",
        ),
    ],
)
async def test_a_run_whose_bounds_are_beyond_the_table_is_refused_before_weights_are_read(
    override: str, sum_of: str, folder: Path, tmp_path: Path
) -> None:
    config = configured(folder, tmp_path / "rows.jsonl", override)

    for refused in (described, train):
        with pytest.raises(InvalidConfig, match=rf"data.max_prompt_tokens \+ {sum_of}"):
            await refused(config)

    assert not (tmp_path / "checkpoints").exists()


def test_a_run_within_the_table_is_described_without_a_warning(folder: Path, tmp_path: Path) -> None:
    with capture_logs() as logs:
        describe_run(configured(folder, tmp_path / "rows.jsonl"))

    assert logs == []


@pytest.mark.parametrize(
    ("scaled", "bound"),
    [
        ({}, 128),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}, 512),
    ],
)
def test_a_run_beyond_what_a_rotary_model_was_made_for_is_warned(
    scaled: dict[str, Any], bound: int, model_folder: ModelFolder, tmp_path: Path
) -> None:
    folder = shutil.copytree(model_folder("qwen2"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | ({"rope_parameters": scaled} if scaled else {})))
    warnings = []
    for completion in (bound - 20, bound - 19):
        override = f"sampling.max_completion_tokens={completion}"
        with capture_logs() as logs:
            describe_run(configured(folder, tmp_path / "rows.jsonl", override))
        warnings.append([(each["event"], each["tokens"], each["trained"]) for each in logs])

    assert warnings == [[], [("max_position_embeddings_exceeded", bound + 1, bound)]]
