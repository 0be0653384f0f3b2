"""A configured run is compared with the memory of its devices before a weight is read."""

from __future__ import annotations

import json
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.configured_run import write_run
from tests.models_hf.questions import Questions, write_questions

from penstock._stages.training_run import torch_memory
from penstock._stages.training_run.torch_memory import DeviceNeeds, needs_of_run
from penstock._stages.training_run.torch_parts import RunParts
from penstock.errors import InvalidConfig
from penstock.runs import describe_run, load_run_config


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory, model_folder: Any) -> Questions:
    return write_questions(tmp_path_factory.mktemp("memory"), model_folder("qwen2"))


def parts_with(questions: Questions, *overrides: str) -> RunParts:
    with chdir(questions.folder):
        return RunParts(load_run_config(questions.values, [f"data.path={questions.folder}/train.jsonl", *overrides]))


def needs_of(parts: RunParts) -> DeviceNeeds:
    (needs,) = needs_of_run(parts.config, parts.empty_model())
    return needs


def nbytes(model: torch.nn.Module, *, trained: bool | None = None) -> int:
    """Return the bytes of all parameters, or of those that train or do not."""
    return sum(each.nbytes for each in model.parameters() if trained is None or each.requires_grad is trained)


@pytest.mark.parametrize(
    ("overrides", "copies"),
    [([], 0), (["algorithm.kl=0.1"], 0), (["model.lora={rank: 2}", "model.base_dtype=bfloat16"], 1)],
    ids=["all parameters", "a reference", "adapters"],
)
def test_what_is_exact_are_the_bytes_of_the_tensors_that_are_made(
    overrides: list[str], copies: int, questions: Questions
) -> None:
    """The torch engine maps the published weights; with adapters each sampler has a copy of the base."""
    parts = parts_with(questions, *overrides)
    model = parts.model()
    trained = nbytes(model, trained=True)
    reference = parts.reference(model)
    frozen_copy = nbytes(reference) if isinstance(reference, torch.nn.Module) else 0

    exact = needs_of(parts).exact

    assert exact["weights"] == nbytes(model)
    assert (exact["gradients"], exact["moments"]) == (trained, 2 * trained)
    assert exact.get("reference", 0) == frozen_copy
    assert exact["published versions"] == 2 * trained
    sampled = sum(each.numel() for each in model.parameters()) * 2
    assert exact.get("weights of samplers", 0) == copies * sampled


def test_checkpointed_activations_and_smaller_micro_batches_need_less(questions: Questions) -> None:
    def bound(*overrides: str) -> int:
        return needs_of(parts_with(questions, *overrides)).bounds["activations"]

    tokens = "algorithm.optimizer.micro_batch_tokens"
    assert bound("model.gradient_checkpointing=true") < bound()
    assert bound(f"{tokens}=1024") * 3 == bound()
    assert bound(f"{tokens}=null") == bound(f"{tokens}={2 * 4 * (512 + 6)}")


def test_a_model_that_does_not_fit_is_refused_with_what_is_needed_and_what_fits(
    questions: Questions, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = needs_of(parts_with(questions)).least
    monkeypatch.setattr(torch_memory, "available_bytes", lambda: needed - 1)

    with pytest.raises(
        InvalidConfig, match=r"fits into cpu, which has .* needs .*: weights .*, gradients .*; what fits: "
    ) as refused:
        parts_with(questions).sketch()

    assert "model.lora={rank: 16} with model.base_dtype=bfloat16" in str(refused.value)


def test_seven_billion_parameters_are_counted_without_a_weight(tmp_path: Path) -> None:
    """The shape of Qwen2.5-7B: 16 bytes a parameter to train, and two published versions of 4."""
    config = write_run(tmp_path, {})
    shape = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    written = json.loads((tmp_path / "model/config.json").read_text())
    del written["layer_types"]
    written |= shape | {"num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False, "head_dim": 128}
    (tmp_path / "model/config.json").write_text(json.dumps(written))

    with pytest.raises(
        InvalidConfig, match=r"fits into cpu, which has \S+ GiB, got one that needs (\d+\.\d) GiB"
    ) as refused:
        describe_run(load_run_config(config))

    needed = float(str(refused.value).partition("needs ")[2].partition(" ")[0])
    assert needed == pytest.approx(7_615_616_512 * 24 / 2**30, rel=0.01)
