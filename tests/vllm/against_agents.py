"""vLLM behind the endpoint of agents, and what `penstock doctor` says of it alone: `make test-vllm`.

The model is a Qwen2 of two small layers with random weights, and a tokenizer of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from anyio.from_thread import start_blocking_portal
from tests.agents_real.talking import TALKS, Talks
from tests.models_hf.chat_templates import QWEN, tokenizer_folder
from tests.ports import free_port
from tests.vllm.against_vllm import recipe
from tokenizers import Tokenizer, normalizers
from transformers import Qwen2Config, Qwen2ForCausalLM

from penstock import SourceEnv
from penstock._cli.endpoint_checks import examined
from penstock._cli.endpoint_programs import PROGRAMS, conclusion
from penstock.chat import ChatFormat
from penstock.models import HFModel
from penstock.policies import HttpPolicy, PretrainedTokenizer, SamplingParams
from penstock.testing import drive, drive_source
from penstock.torch import TorchReference

pytestmark = pytest.mark.timeout(600)

CONTEXT = 2048

AGAINST_FORWARD = 1e-3
"""Nats between two implementations in float32; 1.3e-4 was measured."""

CALL = "'{\"name\": \"' + call.function.name + '\", \"arguments\": ' + (call.function.arguments | tojson) + '}'"
"""As published templates write a call; vLLM sorts the keys of `call.function` in another way than agents do."""

TEMPLATE = QWEN.replace("(call.function | tojson)", CALL)


@pytest.fixture(autouse=True, scope="session")
def _nothing_blocks_the_event_loop() -> None:
    """Override the rule: the clients of others read files while an event loop runs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model with a tokenizer that normalizes as that of transformers for its kind of model does."""
    made = tokenizer_folder(tmp_path_factory.mktemp("model") / "model", TEMPLATE)
    tokenizer: Any = Tokenizer.from_file(str(made / "tokenizer.json"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.save(str(made / "tokenizer.json"))
    end = PretrainedTokenizer(made).eos_id
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.5,
        tie_word_embeddings=False,
        eos_token_id=end,
        pad_token_id=end,
        bos_token_id=None,
    )
    model: Any = Qwen2ForCausalLM(config)
    model.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start vLLM, and yield its URL."""
    logs, port = tmp_path_factory.mktemp("vllm"), free_port()
    options = ["--enable-auto-tool-choice", "--tool-call-parser=hermes"]
    options += ["--enable-scale-out", "--logprobs-mode=processed_logprobs"]
    server = recipe(folder, port, logs, *options, longest=CONTEXT)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(server.open()):
        yield f"http://127.0.0.1:{port}"


async def test_the_doctor_finds_what_differs_in_vllm(url: str, folder: Path) -> None:
    findings = await examined(url, ChatFormat(PretrainedTokenizer(folder)))

    differing = {each.name: each.affects for each in findings if each.verdict == "differs"}
    assert set(differing) == {"malformed tool call", "a continued turn"}
    assert "arguments that are no JSON are replaced" in differing["malformed tool call"]
    assert "the turn is tokenized again" in differing["a continued turn"]
    assert [each.name for each in findings if each.verdict == "exact"] == [
        each for each in PROGRAMS if each not in differing
    ]
    assert conclusion(findings).startswith("by tokens it is exact: sample by HttpPolicy")


async def test_what_vllm_samples_for_each_client_trains_once_as_a_forward_pass_has_it(url: str, folder: Path) -> None:
    chat = ChatFormat(PretrainedTokenizer(folder))
    policy = HttpPolicy(url=url, model="tiny", tempered_logprobs=True)
    sampling = SamplingParams(max_completion_tokens=16)
    env = SourceEnv(Talks, policy, chat=chat, group_size=2, groups=len(TALKS), max_length=CONTEXT, sampling=sampling)

    sampled = await drive_source(env)
    groups = await drive(TorchReference(partial(HFModel.from_pretrained, folder)), sampled)

    assert sampled.ledger.balance().reasons["failed"] == {}
    assert [group.rollouts for group in groups] == [2] * len(TALKS)
    for group in groups:
        assert group.behavior_logprobs is not None
        assert group.ref_logprobs is not None
        np.testing.assert_allclose(group.ref_logprobs, group.behavior_logprobs, atol=AGAINST_FORWARD)
    metrics = sampled.metrics.emit(0)
    trained = sum(int(group.loss_mask.sum()) for group in groups)
    dropped = sum(value for name, value in metrics.items() if name.startswith("rollout/dropped_tokens/"))
    assert trained + dropped == metrics["rollout/tokens"]
