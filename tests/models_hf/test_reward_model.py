from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import transformers
from tests.stages.answers import answering, drive_text

from penstock import RewardBridge, TrajectoryGroup
from penstock.errors import InvalidConfig
from penstock.rewards import RewardModel

Folder = Callable[[str], Path]
auto: Any = transformers.AutoModelForSequenceClassification
auto_tokenizer: Any = transformers.AutoTokenizer


@pytest.fixture
def folder(tmp_path: Path, model_folder: Folder) -> Path:
    """Return the folder of a reward model with random weights."""
    path = tmp_path / "rm"
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = transformers.AutoConfig.from_pretrained(model_folder("qwen2"), num_labels=1)
        auto.from_config(config).save_pretrained(path)
    auto_tokenizer.from_pretrained(model_folder("qwen2")).save_pretrained(path)
    return path


def scored_alone(folder: Path, text: str) -> float:
    """Return the score of transformers itself."""
    tokens = auto_tokenizer.from_pretrained(folder)(text, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        return float(auto.from_pretrained(folder).eval()(**tokens).logits[0, 0])


def bridge(folder: Path, **options: Any) -> RewardBridge:
    return RewardBridge(functions=[RewardModel(folder, **options)])


def question(*completions: str, **meta: Any) -> TrajectoryGroup:
    return answering(*completions, meta=meta)


def test_completions_of_different_lengths_score_as_each_alone(folder: Path) -> None:
    (out,) = anyio.run(
        drive_text, bridge(folder, weight=10), [question("three", "three baskets of apples", prompt="how many? ")]
    )

    expected = [10 * scored_alone(folder, f"how many? {text}") for text in ("three", "three baskets of apples")]
    assert expected[0] != pytest.approx(expected[1], abs=1e-3)
    assert out.reward_parts["rm"].tolist() == pytest.approx(expected, abs=1e-4)


def test_a_conversation_is_scored_by_the_template_of_the_folder(folder: Path) -> None:
    messages = [{"role": "user", "content": "how many?"}]

    (out,) = anyio.run(drive_text, bridge(folder), [question("three", messages=messages)])

    text = "<|user|>how many?<|end|><|assistant|>three<|end|>"
    assert out.rewards.tolist() == pytest.approx([scored_alone(folder, text)], abs=1e-5)


def test_a_folder_without_a_reward_model_is_refused(folder: Path, model_folder: Folder) -> None:
    with pytest.raises(InvalidConfig, match=r"expected a folder with a reward model, got no config\.json in it"):
        anyio.run(drive_text, bridge(folder.parent), [question("three")])
    with pytest.raises(InvalidConfig, match="expected a reward model with one label, got 2"):
        anyio.run(drive_text, bridge(model_folder("qwen2")), [question("three")])

    config = transformers.AutoConfig.from_pretrained(model_folder("qwen2"), num_labels=1)
    language_model: Any = transformers.AutoModelForCausalLM
    language_model.from_config(config).save_pretrained(folder)
    with pytest.raises(InvalidConfig, match=r"expected the weights of a reward model, got none for score\.weight"):
        anyio.run(drive_text, bridge(folder), [question("three")])
