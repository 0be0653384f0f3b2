import math
import pickle
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest
from tests.bigram import EOS, Alphabet, Bigram

from penstock import Context, StopReason, Worker
from penstock.errors import InvalidConfig, LogitsNotFinite
from penstock.policies import Completion, SamplingParams
from penstock.testing import entered
from penstock.torch import TorchPolicy

PROMPT = np.array([3], np.int32)


async def completions(*samplings: SamplingParams, prompts: int = 1, **options: Any) -> list[list[list[int]]]:
    """Return the tokens of `prompts` completions for each, sampled in one batch."""
    found: dict[int, list[Completion]] = {}

    async def ask(place: int, sampling: SamplingParams) -> None:
        found[place] = await engine.generate([PROMPT] * prompts, sampling)

    async with TorchPolicy(Bigram, EOS, **options).open(Worker()) as engine, anyio.create_task_group() as tasks:
        for place, sampling in enumerate(samplings):
            tasks.start_soon(partial(ask, place, sampling))
    return [[completion.tokens.tolist() for completion in found[place]] for place in range(len(samplings))]


# -- seeds -------------------------------------------------------------------------------------------------------------


async def test_a_completion_with_a_seed_does_not_depend_on_the_requests_beside_it() -> None:
    seeded = SamplingParams(max_completion_tokens=12, seed=5)

    (alone,) = await completions(seeded, prompts=3)
    _, beside, _ = await completions(
        SamplingParams(max_completion_tokens=9, top_k=3),
        seeded,
        SamplingParams(seed=7, max_completion_tokens=9),
        prompts=3,
        seed=1,
    )

    assert beside == alone
    assert len({tuple(tokens) for tokens in alone}) == 3


async def test_completions_with_different_seeds_differ() -> None:
    first, second = await completions(
        *(SamplingParams(max_completion_tokens=20, seed=seed) for seed in (5, 6)), prompts=3
    )

    assert first != second


async def test_rows_of_one_batch_keep_their_own_restrictions_when_others_end() -> None:
    narrow = SamplingParams(max_completion_tokens=40, top_k=1, repetition_penalty=1.0)
    short = [SamplingParams(max_completion_tokens=length, top_p=0.9) for length in (1, 2, 3)]
    (expected,) = await completions(SamplingParams(max_completion_tokens=40, greedy=True))

    *_, drawn = await completions(*short, narrow)

    assert drawn == expected


# -- stop strings ------------------------------------------------------------------------------------------------------


async def text_until(*stop: str) -> list[tuple[str, StopReason]]:
    sampling = SamplingParams(max_completion_tokens=30, stop=stop, seed=1)
    with entered(Context(tokenizer=Alphabet())):
        async with TorchPolicy(Bigram, EOS).open(Worker()) as engine:
            sampled = await engine.generate([PROMPT] * 8, sampling)
    return [(Alphabet().decode(completion.tokens.tolist()), completion.stop_reason) for completion in sampled]


async def test_a_completion_ends_after_the_token_that_completes_a_stop_string() -> None:
    whole = await text_until("no such string")
    place = max(range(len(whole)), key=lambda each: len(whole[each][0]))
    wanted = whole[place][0][3:5]

    cut = await text_until(wanted, "not in the alphabet")

    for (before, ended), (after, reason) in zip(whole, cut, strict=True):
        head, found, _ = before.partition(wanted)
        assert after == head + found
        assert reason == (StopReason.STOP if found else ended)
    assert cut[place][0].endswith(wanted)


async def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    async with TorchPolicy(Bigram, EOS).open(Worker()) as engine:
        with pytest.raises(InvalidConfig, match=r"expected a source with a tokenizer.* got none for \['ab'\]: use"):
            await engine.generate([PROMPT], SamplingParams(stop=("ab",)))


# -- logits ------------------------------------------------------------------------------------------------------------


def with_logits(row: int, columns: Any, value: float) -> Bigram:
    model = Bigram()
    model.table.data[row, columns] = value
    return model


@pytest.mark.parametrize("options", [{}, {"greedy": True}, {"top_k": 5}, {"repetition_penalty": 1.5}, {"top_p": 0.9}])
@pytest.mark.parametrize(
    ("columns", "value"), [([7], math.nan), ([EOS], math.nan), ([0], math.inf), (slice(None), -math.inf)]
)
async def test_logits_of_which_no_token_can_be_drawn_end_the_request(
    columns: Any, value: float, options: dict[str, Any]
) -> None:
    policy = TorchPolicy(partial(with_logits, int(PROMPT[0]), columns, value), EOS)
    finite = np.array([4], np.int32)

    async with policy.open(Worker()) as engine:
        with pytest.raises(LogitsNotFinite, match=r"finite logits .* 1 tokens of a prompt and 0 .* of version 0"):
            await engine.generate([PROMPT], SamplingParams(**options))
        (completion,) = await engine.generate([finite], SamplingParams(max_completion_tokens=1, **options))

    assert len(completion.tokens) == 1


async def test_logits_may_exclude_some_tokens() -> None:
    policy = TorchPolicy(partial(with_logits, int(PROMPT[0]), slice(1, None), -math.inf), EOS)

    async with policy.open(Worker()) as engine:
        (completion,) = await engine.generate([PROMPT], SamplingParams(max_completion_tokens=1))

    assert completion.tokens.tolist() == [0]


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_completion_tokens": 0}, "max_completion_tokens: expected a whole number of at least 1, got 0"),
        ({"temperature": -0.1}, "temperature: expected a finite number of 0 or more, got -0.1"),
        ({"temperature": False}, "temperature: expected a finite number of 0 or more, got False"),
        ({"top_p": 0.0}, "top_p: expected a finite number above 0, got 0.0"),
        ({"top_p": 1.5}, "top_p: expected at most 1, got 1.5"),
        ({"top_k": -2}, "top_k: expected a whole number of at least 1, got -2"),
        ({"top_k": False}, "top_k: expected a whole number of at least 1, got False"),
        ({"min_p": -0.1}, "min_p: expected a finite number of 0 or more, got -0.1"),
        ({"repetition_penalty": 0}, "repetition_penalty: expected a finite number above 0, got 0"),
        ({"seed": -1}, "seed: expected a whole number of at least 0, got -1"),
        ({"stop": "</answer>"}, "stop: expected a tuple of strings that are not empty, got '</answer>'"),
        ({"stop": ("",)}, r"stop: expected a tuple of strings that are not empty, got \(''"),
        ({"stop_ids": 7}, "stop_ids: expected token ids, whole numbers of 0 or more, got 7"),
        ({"stop_ids": (-1,)}, r"stop_ids: expected token ids, whole numbers of 0 or more, got \(-1,\)"),
        ({"stop_ids": ("</s>",)}, r"stop_ids: expected token ids, whole numbers of 0 or more, got \('</s>',\)"),
        ({"stop_ids": "12"}, "stop_ids: expected token ids, whole numbers of 0 or more, got '12'"),
    ],
)
def test_values_that_could_not_sample_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=rf"SamplingParams\.{message}"):
        SamplingParams(**options)


def test_temperature_0_is_greedy_and_top_k_below_1_takes_all_tokens() -> None:
    assert SamplingParams(temperature=0) == SamplingParams(temperature=0.0) == SamplingParams(greedy=True)
    assert SamplingParams(temperature=np.float32(0)).greedy  # type: ignore[arg-type]
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0) == SamplingParams()
    assert not SamplingParams(top_k=np.int64(-1)).truncates  # type: ignore[arg-type]


def test_sampling_params_travel_to_workers_in_a_policy_and_stay_equal() -> None:
    sampling = SamplingParams(top_k=np.int64(3), stop=["a"], stop_ids=np.array([7]), seed=2)  # type: ignore[arg-type]

    assert sampling == SamplingParams(top_k=3, stop=("a",), stop_ids=(7,), seed=2)
    assert pickle.loads(pickle.dumps(sampling)) == sampling  # noqa: S301 (our own bytes)
