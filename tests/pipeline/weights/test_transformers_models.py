"""Models of transformers, built on the meta device and attached to published weights, say what the originals say.

Runs with whatever transformers is installed, 4.57 or 5; with 5, configurations of both layouts are read.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import WeightsMismatch
from penstock.weights import FusedTensor, WeightPublisher, WeightSubscriber

transformers = pytest.importorskip("transformers", reason="pip install 'transformers>=4.57'")

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

MODELS = {
    "llama 3": ("Llama", 500_000.0, LLAMA_3, {}),
    "qwen 2.5": ("Qwen2", 1_000_000.0, None, {"tie_word_embeddings": True}),
    "yarn": ("Qwen2", 1_000_000.0, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, {}),
    "linear": ("Llama", 10_000.0, {"rope_type": "linear", "factor": 2.0}, {}),
    "dynamic": ("Llama", 20_000.0, {"rope_type": "dynamic", "factor": 2.0}, {}),
}

CASES = [(kind, "rope_theta") for kind in MODELS]
"""The entries of a configuration for the rotary embedding: two in transformers 4.x, one in 5."""

if transformers.__version__ >= "5":
    CASES += [("llama 3", "rope_parameters"), ("qwen 2.5", "rope_parameters")]

TOKENS = torch.arange(90).reshape(1, 90) % 97
"""Longer than `max_position_embeddings`: dynamic scaling takes effect."""

SHORT = TOKENS[:, :12]

FUSED = [
    FusedTensor("model.layers.*.qkv.weight", tuple(f"model.layers.*.self_attn.{name}_proj.weight" for name in "qkv")),
    FusedTensor(
        "model.layers.*.gate_up.weight", tuple(f"model.layers.*.mlp.{name}_proj.weight" for name in ("gate", "up"))
    ),
]


def config_of(kind: str, layout: str) -> Any:
    family, theta, scaling, rest = MODELS[kind]
    if layout == "rope_theta":
        rotary: dict[str, Any] = {"rope_theta": theta, "rope_scaling": scaling}
    else:
        rotary = {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | (scaling or {})}
    config = getattr(transformers, f"{family}Config").from_dict(SMALL | rest | rotary)
    config._attn_implementation = "eager"
    return config


def built(config: Any, device: str) -> nn.Module:
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(1)
        model: nn.Module = getattr(transformers, type(config).__name__.replace("Config", "ForCausalLM"))(config)
    return model.eval()


@asynccontextmanager
async def attached(original: nn.Module, model: nn.Module) -> AsyncIterator[None]:
    """Attach `model` to the weights of `original`, which are published as inference servers use them."""
    async with WeightPublisher(original, fused=FUSED) as publisher, WeightSubscriber(publisher.url) as subscriber:
        await publisher.publish(original.state_dict(), 1)
        subscriber.attach(model, fused=FUSED)
        subscriber.refresh()
        yield


@torch.inference_mode()
def logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(tokens, use_cache=False).logits
    return logits


@pytest.mark.parametrize(("kind", "layout"), CASES)
async def test_an_attached_model_from_the_meta_device_predicts_like_the_original(kind: str, layout: str) -> None:
    original, model = built(config_of(kind, layout), "cpu"), built(config_of(kind, layout), "meta")

    async with attached(original, model):
        for tokens in (TOKENS, SHORT, TOKENS):  # dynamic scaling makes its table anew each time
            assert torch.equal(logits(model, tokens), logits(original, tokens))
        rotary = model.get_submodule("model.rotary_emb")
        rotary.inv_freq = 10_000.0 ** -(torch.arange(0, 8, 2) / 8)
        assert not torch.equal(logits(model, TOKENS), logits(original, TOKENS)), "else a default would do"

    assert not [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    embed, head = (model.get_parameter(f"{name}.weight") for name in ("model.embed_tokens", "lm_head"))
    assert (embed is head) is (kind == "qwen 2.5")


@pytest.mark.parametrize(("kind", "other"), [("llama 3", "linear"), ("linear", "dynamic"), ("yarn", "qwen 2.5")])
async def test_a_model_of_another_rotary_configuration_is_refused(kind: str, other: str) -> None:
    original, model = built(config_of(kind, "rope_theta"), "cpu"), built(config_of(other, "rope_theta"), "meta")

    with pytest.raises(
        WeightsMismatch, match=r"rotary_emb\.inv_freq: expected float32 \[4\] of xxh3 .*, found float32"
    ):
        async with attached(original, model):
            pytest.fail("it would compute other positions")

    assert model.get_buffer("model.rotary_emb.inv_freq").is_meta
