"""What vLLM itself records of a mixture of experts, on a CPU: the experts of each token, and the support of its draw.

`make test-vllm`; the suite does not collect this file. The mixture is a Qwen3-MoE of three small layers, in which four
experts each have equal logits: rounding decides which of them are chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from anyio.from_thread import start_blocking_portal
from numpy.typing import NDArray
from tests.models_hf.mixtures import PROMPTS, QWEN3, batch_of, stepped, write_mixture
from tests.ports import free_port
from tests.vllm.against_vllm import recipe
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from penstock import Worker
from penstock.models import HFModel
from penstock.policies import Completion, HttpPolicy, RoutedExperts, SamplingParams

pytestmark = pytest.mark.timeout(900)

VOCABULARY, CONTEXT = 320, 128
SHAPE = RoutedExperts(layers=3, chosen=2, experts=8)
"""vLLM records all layers, those without experts included."""

NOISE = 1e-3
"""Nats between two implementations in float32."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mixture")
    words = {"<eos>": 0, **{f"w{number}": number for number in range(1, VOCABULARY)}}
    eos, unknown = "<eos>", "w1"
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, eos_token=eos, unk_token=unknown).save_pretrained(made)
    return write_mixture(made, **QWEN3, head_dim=32, moe_intermediate_size=32)


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start vLLM, and yield its URL."""
    logs, port = tmp_path_factory.mktemp("vllm"), free_port()
    options = ["--enable-return-routed-experts", "--logprobs-mode=processed_logprobs"]
    server = recipe(folder, port, logs, *options, longest=CONTEXT)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(server.open()):
        yield f"http://127.0.0.1:{port}"


async def sampled(url: str, sampling: SamplingParams) -> list[Completion]:
    """Return two completions of each prompt."""
    policy = HttpPolicy(url=url, model="tiny", server="vllm", tempered_logprobs=True, routed_experts=SHAPE)
    async with policy.open(Worker()) as engine:
        return await engine.generate([prompt for prompt in PROMPTS for _ in range(2)], sampling)


async def test_replayed_experts_make_the_log_probabilities_those_of_vllm(url: str, folder: Path) -> None:
    batch = batch_of(await sampled(url, SamplingParams(max_completion_tokens=24)))

    replayed, _ = stepped(HFModel.from_pretrained(folder), batch, router_replay="R3")
    chosen, _ = stepped(HFModel.from_pretrained(folder), batch)

    assert batch.routed_experts is not None
    assert batch.routed_experts.any(axis=(0, 2)).tolist() == [True, False, True]
    assert replayed.largest < NOISE
    assert chosen.largest > 10 * replayed.largest


async def test_the_support_of_a_truncated_draw_is_that_of_vllm(url: str, folder: Path) -> None:
    sampling = SamplingParams(max_completion_tokens=24, top_k=6, top_p=0.8, temperature=0.7, keep_support=True)
    completions = await sampled(url, sampling)

    supports = [support_of(each) for each in completions]
    batch = batch_of(completions)
    kept = np.full((len(batch.tokens), 6), -1, np.int32)
    kept[batch.loss_mask] = np.concatenate(supports)
    found, _ = stepped(
        HFModel.from_pretrained(folder),
        msgspec.structs.replace(batch, support_ids=kept),
        router_replay="R3",
        temperature=0.7,
    )

    assert found.largest < NOISE
    assert len(set((np.concatenate(supports) >= 0).sum(1).tolist())) > 1


def support_of(completion: Completion) -> NDArray[np.int32]:
    assert completion.support_ids is not None
    return completion.support_ids
