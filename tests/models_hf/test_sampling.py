"""Truncation and penalties of `TorchPolicy`, compared with the logits processors of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.bigram import EOS, VOCABULARY, Bigram
from tests.cells import cells
from transformers.generation import logits_process as hf

from penstock import Worker
from penstock.policies import Completion, SamplingParams
from penstock.torch import TorchPolicy

DRAWS = 4000

PROMPT = np.array([3, 8, 8, 1], np.int32)

CASES: list[dict[str, Any]] = [
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"repetition_penalty": 1.7},
    {"temperature": 0.6, "top_k": 9, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 0.6},
    {"temperature": 1.5, "top_p": 0.05},
]


async def sampled(sampling: SamplingParams, times: int) -> list[Completion]:
    async with TorchPolicy(Bigram, EOS, max_rows=times).open(Worker()) as engine:
        return await engine.generate([PROMPT] * times, sampling)


def processed(sampling: SamplingParams, given: NDArray[np.int32]) -> torch.Tensor:
    """Return [V] the probabilities of the token after `given`, by transformers."""
    processors = hf.LogitsProcessorList(
        [
            hf.RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)),
            hf.TemperatureLogitsWarper(float(sampling.temperature)),
            hf.TopKLogitsWarper(sampling.top_k or VOCABULARY),
            hf.TopPLogitsWarper(sampling.top_p),
            hf.MinPLogitsWarper(sampling.min_p),
        ]
    )
    tokens: Any = torch.from_numpy(given.astype(np.int64))[None]
    return processors(tokens, Bigram().table.detach()[tokens[:, -1]]).softmax(-1)[0]


@pytest.mark.parametrize("options", cells(CASES, run=CASES[-2:]), ids=str)
async def test_tokens_are_drawn_from_the_distribution_that_transformers_draws_from(options: dict[str, Any]) -> None:
    sampling = SamplingParams(max_completion_tokens=2, **options)

    completions = await sampled(sampling, DRAWS)

    expected = processed(sampling, PROMPT)
    counts = np.bincount([completion.tokens[0] for completion in completions], minlength=VOCABULARY)
    assert not counts[expected.numpy() == 0].any()
    np.testing.assert_allclose(counts / DRAWS, expected, atol=0.03)
    second = [completion for completion in completions if len(completion.tokens) > 1]
    for completion in second[:200]:
        assert processed(sampling, np.append(PROMPT, completion.tokens[0]))[completion.tokens[1]] > 0


@pytest.mark.parametrize("options", CASES, ids=str)
async def test_log_probabilities_are_those_before_truncation_and_penalty(options: dict[str, Any]) -> None:
    sampling = SamplingParams(max_completion_tokens=3, **options)

    completions = await sampled(sampling, 100)

    whole = torch.log_softmax(Bigram().table.detach() / sampling.temperature, dim=-1)
    for completion in completions:
        before = [int(PROMPT[-1]), *completion.tokens[:-1].tolist()]
        expected = whole[before, completion.tokens.tolist()]
        assert completion.logprobs is not None
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)


async def test_greedy_sampling_takes_the_best_penalised_token_with_the_log_probability_of_the_model() -> None:
    sampling = SamplingParams(max_completion_tokens=12, greedy=True, temperature=0.3, top_k=2, repetition_penalty=3.0)

    async with TorchPolicy(Bigram, EOS).open(Worker()) as engine:
        (completion,) = await engine.generate([PROMPT], sampling)

    given = PROMPT
    for token, logprob in zip(completion.tokens, completion.logprobs, strict=True):  # type: ignore[arg-type]
        assert token == processed(sampling, given).argmax()
        assert logprob == pytest.approx(torch.log_softmax(Bigram().table[given[-1]], -1)[token].item(), abs=1e-5)
        given = np.append(given, token)
