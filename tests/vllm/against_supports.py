"""The support of a truncated draw as vLLM itself returns it, on a CPU: `make test-vllm`. The suite leaves it out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from anyio.from_thread import start_blocking_portal
from tests.ports import free_port
from tests.vllm.against_vllm import NOISE, PROMPT, model, recipe, save

from penstock import Worker
from penstock.errors import InvalidConfig
from penstock.policies import HttpPolicy, SamplingParams

pytestmark = pytest.mark.timeout(900)

TRUNCATED = SamplingParams(max_completion_tokens=24, top_k=6, top_p=0.8, temperature=0.7, keep_support=True)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start vLLM, and yield its URL."""
    folder, port = tmp_path_factory.mktemp("vllm"), free_port()
    server = recipe(save(folder / "weights", 0), port, folder, "--logprobs-mode=processed_logprobs")
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(server.open()):
        yield f"http://127.0.0.1:{port}"


async def test_each_token_was_drawn_from_the_support_with_the_log_probability_over_it(url: str) -> None:
    async with HttpPolicy(url=url, model="tiny", tempered_logprobs=True).open(Worker()) as engine:
        completions = await engine.generate([PROMPT] * 6, TRUNCATED)

    sizes = set[int]()
    for completion in completions:
        assert completion.support_ids is not None
        assert completion.logprobs is not None
        tokens = torch.from_numpy(np.concatenate([PROMPT, completion.tokens])).long()
        with torch.no_grad():
            logits = model(0)(tokens[None]).logits[0, len(PROMPT) - 1 : -1] / TRUNCATED.temperature
        for row, ids, token, logprob in zip(
            logits, completion.support_ids, completion.tokens, completion.logprobs, strict=True
        ):
            kept = torch.from_numpy(ids[ids >= 0]).long()
            sizes.add(len(kept))
            place = kept.tolist().index(int(token))
            assert torch.log_softmax(row[kept], -1)[place].item() == pytest.approx(float(logprob), abs=NOISE)
            assert row[kept].min() >= row[[each for each in range(len(row)) if each not in kept]].max() - NOISE
    assert len(sizes) > 1


async def test_a_server_with_the_model_s_own_log_probabilities_is_refused(url: str) -> None:
    async with HttpPolicy(url=url, model="tiny").open(Worker()) as engine:
        with pytest.raises(
            InvalidConfig, match="keep_support: expected a server that returns the tokens it draws from"
        ):
            await engine.generate([PROMPT], TRUNCATED)
