import pickle
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from anyio.lowlevel import checkpoint
from numpy.typing import NDArray
from tests.failsafe import FAILSAFE_S
from tests.fake_policy import Letters
from tests.tiny_model import TinyModel
from torch import Tensor

from penstock import Context, StopReason, Worker
from penstock.errors import InvalidConfig
from penstock.policies import Completion, Engine, SamplingParams
from penstock.testing import entered
from penstock.torch import Attention, KVCache, TorchPolicy
from penstock.weights import WeightPublisher

EOS = 3


def prompt(*tokens: int) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)


PROMPTS = [prompt(1, 2, 4, 5, 6), prompt(7), prompt(1, 2, 4, 5, 6), prompt(8, 9, 1)]


@torch.inference_mode()
def fresh_logprobs(
    model: TinyModel, given: NDArray[np.int32], completion: Completion, temperature: float = 1.0
) -> NDArray[np.float32]:
    """Return the log-probabilities of the sampled tokens, of one forward pass over the whole sequence."""
    tokens = torch.from_numpy(np.concatenate([given, completion.tokens]).astype(np.int64))[None]
    attend = Attention.causal(torch.ones_like(tokens, dtype=torch.bool))
    logits = model(tokens, positions=torch.arange(tokens.shape[1])[None], attend=attend) / temperature
    logprobs = torch.log_softmax(logits[0, len(given) - 1 : -1], dim=-1)
    return logprobs.gather(1, tokens[0, len(given) :, None])[:, 0].numpy()


def logprobs_of(completion: Completion) -> NDArray[np.float32]:
    assert completion.logprobs is not None
    return completion.logprobs


async def completions(
    policy: TorchPolicy,
    prompts: Sequence[NDArray[np.int32]],
    *,
    max_completion_tokens: int = 8,
    **options: Any,
) -> list[Completion]:
    sampling = SamplingParams(max_completion_tokens=max_completion_tokens, **options)
    async with policy.open(Worker()) as engine:
        return await engine.generate(prompts, sampling)


@dataclass
class Counting(TinyModel):
    """Counts the rows of each call."""

    rows: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def forward(self, tokens: Tensor, *, positions: Tensor, attend: Attention, cache: KVCache | None = None) -> Tensor:
        self.rows.append(len(tokens))
        return super().forward(tokens, positions=positions, attend=attend, cache=cache)

    __hash__ = TinyModel.__hash__


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_behavior_logprobs_are_those_of_a_fresh_forward_pass(temperature: float) -> None:
    policy = TorchPolicy(TinyModel, EOS)

    sampled = await completions(policy, PROMPTS * 4, max_completion_tokens=12, temperature=temperature)

    for given, completion in zip(PROMPTS * 4, sampled, strict=True):
        expected = fresh_logprobs(TinyModel(), given, completion, temperature)
        np.testing.assert_allclose(logprobs_of(completion), expected, atol=1e-4)


async def test_a_completion_ends_with_the_end_token_or_at_the_allowance() -> None:
    sampled = await completions(TorchPolicy(TinyModel, EOS), PROMPTS * 16, max_completion_tokens=6)

    for completion in sampled:
        ends = (completion.tokens == EOS).tolist()
        assert not any(ends[:-1])
        assert completion.stop_reason == (StopReason.STOP if ends[-1] else StopReason.LENGTH)
        assert len(ends) == 6 or ends[-1]
    assert {completion.stop_reason for completion in sampled} == {StopReason.STOP, StopReason.LENGTH}


async def test_the_end_token_is_by_default_that_of_the_pipeline_s_tokenizer() -> None:
    with entered(Context(tokenizer=Letters(eos_id=EOS))):
        by_tokenizer = await completions(TorchPolicy(TinyModel), PROMPTS, max_completion_tokens=6)

    given = await completions(TorchPolicy(TinyModel, EOS), PROMPTS, max_completion_tokens=6)
    assert [each.tokens.tolist() for each in by_tokenizer] == [each.tokens.tolist() for each in given]
    with pytest.raises(InvalidConfig, match=r"TorchPolicy\.eos_id: expected one, because no stage states a tokenizer"):
        await completions(TorchPolicy(TinyModel), PROMPTS)


async def test_greedy_sampling_takes_the_most_probable_token_with_its_log_probability() -> None:
    first, again = [await completions(TorchPolicy(TinyModel, EOS, seed=s), PROMPTS, greedy=True) for s in (0, 1)]

    for given, one, other in zip(PROMPTS, first, again, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(logprobs_of(one), fresh_logprobs(TinyModel(), given, one), atol=1e-4)
    assert first[0].tokens.tolist() == first[2].tokens.tolist()


async def test_tokens_are_drawn_as_often_as_they_are_probable() -> None:
    policy = TorchPolicy(TinyModel, EOS, max_rows=4000)

    sampled = await completions(policy, [prompt(1, 2)] * 4000, max_completion_tokens=1, temperature=0.5)

    tokens = np.concatenate([completion.tokens for completion in sampled])
    expected = np.zeros(11)
    expected[tokens] = np.exp(np.concatenate([logprobs_of(completion) for completion in sampled]))
    np.testing.assert_allclose(np.bincount(tokens, minlength=11) / 4000, expected, atol=0.03)


async def test_rows_of_one_batch_have_their_own_limit_and_temperature() -> None:
    model, lengths = Counting(), dict[int, list[int]]()
    requests: list[tuple[int, dict[str, Any]]] = [(2, {}), (9, {"greedy": True}), (4, {"temperature": 0.1})]

    async def ask(engine: Engine, longest: int, options: dict[str, Any]) -> None:
        (completion,) = await engine.generate(
            [prompt(longest)], SamplingParams(max_completion_tokens=longest, **options)
        )
        assert completion.stop_reason == StopReason.LENGTH
        lengths[longest] = [len(completion.tokens)]

    async with TorchPolicy(lambda: model, 99).open(Worker()) as engine, anyio.create_task_group() as tasks:
        for request in requests:
            tasks.start_soon(ask, engine, *request)

    assert lengths == {2: [2], 9: [9], 4: [4]}
    assert model.rows == [3, 3, 2, 2, 1, 1, 1, 1, 1]


async def test_equal_prompts_are_read_once_and_finished_rows_are_dropped() -> None:
    model = Counting()

    async with TorchPolicy(lambda: model, 99).open(Worker()) as engine, anyio.create_task_group() as tasks:
        for longest in (1, 3):
            tasks.start_soon(
                partial(engine.generate, [prompt(1, 2)] * 4, SamplingParams(max_completion_tokens=longest))
            )

    assert model.rows == [1, 4, 4]


async def test_closing_ends_a_batch_at_the_next_token_and_its_requests_fail() -> None:
    begun, closed, failed, exiting = threading.Event(), threading.Event(), anyio.Event(), anyio.Event()

    class Waiting(Counting):
        def new_cache(self, batch: int, capacity: int) -> KVCache:
            begun.set()
            closed.wait()
            return super().new_cache(batch, capacity)

    async def ask(engine: Engine) -> None:
        with pytest.raises(anyio.ClosedResourceError):
            await engine.generate([prompt(1)], SamplingParams(max_completion_tokens=50))
        failed.set()

    async def continue_once_closed() -> None:
        await exiting.wait()
        await anyio.wait_all_tasks_blocked()
        closed.set()

    model = Waiting()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(continue_once_closed)
        async with TorchPolicy(lambda: model, 99).open(Worker()) as engine:
            tasks.start_soon(ask, engine)
            while not begun.is_set():
                await checkpoint()
            exiting.set()
        await failed.wait()

    assert model.rows == [1]


async def test_requests_of_one_tick_are_sampled_as_one_batch() -> None:
    model = Counting()
    policy = TorchPolicy(lambda: model, 99)

    async with policy.open(Worker()) as engine, anyio.create_task_group() as rollouts:
        for token in (1, 2, 4):
            rollouts.start_soon(partial(engine.generate, [prompt(token)] * 2, SamplingParams(max_completion_tokens=2)))

    assert model.rows == [3, 6]


async def test_a_batch_is_never_larger_than_max_rows() -> None:
    model = Counting()

    sampled = await completions(
        TorchPolicy(lambda: model, 99, max_rows=2), [prompt(t) for t in range(5)], max_completion_tokens=1
    )

    assert model.rows == [2, 2, 1]
    assert [len(completion.tokens) for completion in sampled] == [1] * 5


@pytest.mark.usefixtures("one_thread")  # and restores the number of threads
async def test_workers_of_one_host_share_the_threads() -> None:
    torch.set_num_threads(6)

    async with TorchPolicy(TinyModel, EOS).open(Worker(1, 3)):
        assert torch.get_num_threads() == 6  # each on a host of its own
    async with TorchPolicy(TinyModel, EOS).open(Worker(1, 3, on_host=3)):
        assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("one_thread")
async def test_equal_seeds_repeat_and_workers_differ() -> None:
    async def texts(worker: Worker, seed: int = 0) -> list[list[int]]:
        async with TorchPolicy(TinyModel, EOS, seed=seed).open(worker) as engine:
            return [
                c.tokens.tolist() for c in await engine.generate(PROMPTS * 4, SamplingParams(max_completion_tokens=8))
            ]

    first = await texts(Worker(0, 2))

    assert await texts(Worker(0, 2)) == first
    assert await texts(Worker(1, 2)) != first
    assert await texts(Worker(0, 2, restart=1)) != first
    assert await texts(Worker(0, 2), seed=1) != first


async def test_an_exception_of_the_model_fails_its_requests_and_no_later_ones() -> None:
    policy = TorchPolicy(partial(TinyModel, context=4), EOS)

    async with policy.open(Worker()) as engine:
        with pytest.raises(IndexError):
            await engine.generate([prompt(1, 2, 4, 5, 6)], SamplingParams(max_completion_tokens=1))
        assert len(await engine.generate([prompt(1)], SamplingParams(max_completion_tokens=1))) == 1


async def test_a_cancelled_request_is_not_sampled() -> None:
    model = Counting()

    async with TorchPolicy(lambda: model, 99).open(Worker()) as engine:
        with anyio.move_on_after(0):
            await engine.generate([prompt(1)] * 3, SamplingParams(max_completion_tokens=1))
        await engine.generate([prompt(2), prompt(4)], SamplingParams(max_completion_tokens=1))

    assert model.rows == [2]


async def test_closing_fails_the_requests_of_a_paused_batch() -> None:
    failures: list[Exception] = []

    async def ask(engine: Engine) -> None:
        try:
            await engine.generate(PROMPTS, SamplingParams(max_completion_tokens=2))
        except anyio.ClosedResourceError as error:
            failures.append(error)

    with anyio.fail_after(FAILSAFE_S):
        async with anyio.create_task_group() as tasks, TorchPolicy(TinyModel, EOS).open(Worker()) as engine:
            await engine.pause()
            tasks.start_soon(ask, engine)
            await anyio.wait_all_tasks_blocked()

    assert len(failures) == 1


async def test_after_closing_pending_and_later_requests_fail() -> None:
    async def ask(engine: Engine) -> None:
        with pytest.raises(anyio.ClosedResourceError):
            await engine.generate([prompt(1)], SamplingParams(max_completion_tokens=5))

    with anyio.fail_after(FAILSAFE_S):
        policy = TorchPolicy(TinyModel, EOS, max_rows=1)
        async with anyio.create_task_group() as tasks, policy.open(Worker()) as engine:
            await engine.pause()
            for _ in range(2):  # one is in the paused batch, the other is pending
                tasks.start_soon(ask, engine)
            await anyio.wait_all_tasks_blocked()
        await ask(engine)


async def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected prompts of at least one token, got lengths \[1, 0\]"):
        await completions(TorchPolicy(TinyModel, EOS), [prompt(1), prompt()])


async def test_no_prompts_give_no_completions() -> None:
    assert await completions(TorchPolicy(TinyModel, EOS), []) == []


async def test_sampled_tokens_are_counted() -> None:
    context = Context()

    with entered(context):
        sampled = await completions(TorchPolicy(TinyModel, EOS), PROMPTS)

    metrics = context.metrics.emit(0)
    assert metrics["rollout/tokens"] == sum(len(completion.tokens) for completion in sampled)
    assert metrics["rollout/rows_per_batch"] == 4


def test_a_policy_can_be_pickled() -> None:
    policy = TorchPolicy(partial(TinyModel, layers=1), EOS, seed=5)

    copy = pickle.loads(pickle.dumps(policy))  # noqa: S301 (our own bytes)

    assert (copy.eos_id, copy.seed, copy.weights) == (EOS, 5, None)


async def test_random_numbers_depend_on_the_version_and_not_on_earlier_requests() -> None:
    async def drawn(policy: TorchPolicy, *, warm: bool) -> list[list[int]]:
        async with policy.open(Worker()) as engine:
            if warm:
                await engine.generate(PROMPTS, SamplingParams(max_completion_tokens=5))
            await engine.update_weights(publisher.url, 3)
            return [c.tokens.tolist() for c in await engine.generate(PROMPTS, SamplingParams(max_completion_tokens=5))]

    policy, weights = TorchPolicy(TinyModel, EOS, seed=1), TinyModel().state_dict()
    async with WeightPublisher(weights) as publisher:
        await publisher.publish(weights, 3)
        first, again = await drawn(policy, warm=True), await drawn(policy, warm=False)

    assert first == again
    assert first != [c.tokens.tolist() for c in await completions(policy, PROMPTS, max_completion_tokens=5)]
