"""Rows join a running batch of `TorchPolicy`, and leave it, one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any

import anyio
import anyio.from_thread
import numpy as np
import pytest
import torch
from anyio.lowlevel import checkpoint
from numpy.typing import NDArray
from tests.tiny_model import TinyModel
from torch import Tensor

from penstock import Context, StopReason, Worker
from penstock.policies import Completion, Engine, SamplingParams
from penstock.testing import entered
from penstock.torch import Attention, KVCache, TorchPolicy

EOS = 99
"""Never drawn: completions end at their allowance."""


class Watched(TinyModel):
    """Records the rows of each pass, and calls functions of a test before one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rows: list[int] = []
        self.before: dict[int, Callable[[], Coroutine[Any, Any, None]]] = {}
        """Called in the event loop before a pass, which is counted from 0."""
        self.rounds: Iterator[int] | None = None
        """Rounds of the event loop during each pass."""

    def forward(self, tokens: Tensor, *, positions: Tensor, attend: Attention, cache: KVCache | None = None) -> Tensor:
        if (call := self.before.get(len(self.rows))) is not None:
            anyio.from_thread.run(call)
        for _ in range(next(self.rounds) if self.rounds is not None else 0):
            anyio.from_thread.run(checkpoint)
        self.rows.append(len(tokens))
        return super().forward(tokens, positions=positions, attend=attend, cache=cache)


def prompt(*tokens: int) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)


@torch.inference_mode()
def fresh_logprobs(given: NDArray[np.int32], completion: Completion) -> NDArray[np.float32]:
    """Return the log-probabilities of the sampled tokens, of one forward pass over the whole sequence."""
    tokens = torch.from_numpy(np.concatenate([given, completion.tokens]).astype(np.int64))[None]
    attend = Attention.causal(torch.ones_like(tokens, dtype=torch.bool))
    logits = TinyModel()(tokens, positions=torch.arange(tokens.shape[1])[None], attend=attend)
    logprobs = torch.log_softmax(logits[0, len(given) - 1 : -1], dim=-1)
    return logprobs.gather(1, tokens[0, len(given) :, None])[:, 0].numpy()


def check_logprobs(given: NDArray[np.int32], completion: Completion) -> None:
    """Check that log-probabilities are those of one forward pass over the whole sequence."""
    assert completion.logprobs is not None
    np.testing.assert_allclose(completion.logprobs, fresh_logprobs(given, completion), atol=1e-5)


async def one(engine: Engine, given: NDArray[np.int32], longest: int, **options: Any) -> Completion:
    (completion,) = await engine.generate([given], SamplingParams(max_completion_tokens=longest, **options))
    return completion


async def test_a_row_that_is_done_is_returned_before_the_others_end() -> None:
    model, returned = Watched(), dict[int, int]()

    async def ask(engine: Engine, longest: int) -> None:
        await one(engine, prompt(longest % 10), longest)
        returned[longest] = len(model.rows)

    async with TorchPolicy(lambda: model, EOS).open(Worker()) as engine, anyio.create_task_group() as tasks:
        for longest in (2, 5, 20):
            tasks.start_soon(ask, engine, longest)

    assert returned == {2: 2, 5: 5, 20: 20}


@pytest.mark.parametrize(
    "turns",
    [
        {"short": [(prompt(1, 2), 2), (prompt(4, 5, 6, 7, 8, 9, 1, 2, 4), 6)], "long": [(prompt(7), 9)]},
        {"short": [(prompt(1), 3), (prompt(4), 6), (prompt(5, 6), 12)], "long": [(prompt(*range(1, 11)), 7)]},
    ],
    ids=["a longer row", "shorter rows"],
)
async def test_rows_that_join_have_the_log_probabilities_of_rows_alone(
    turns: dict[str, list[tuple[NDArray[np.int32], int]]],
) -> None:
    model, sampled = Watched(), list[tuple[NDArray[np.int32], Completion]]()

    async def ask(engine: Engine, own: list[tuple[NDArray[np.int32], int]]) -> None:
        for given, longest in own:
            sampled.append((given, await one(engine, given, longest)))

    async with TorchPolicy(lambda: model, EOS).open(Worker()) as engine, anyio.create_task_group() as tasks:
        for own in turns.values():
            tasks.start_soon(ask, engine, own)

    for given, completion in sampled:
        check_logprobs(given, completion)
    # A turn takes as many passes as it has tokens; the first of each reads the prompt of that row alone.
    assert len(model.rows) < sum(longest for own in turns.values() for _, longest in own)


async def test_what_a_row_draws_does_not_depend_on_the_requests_after_it() -> None:
    async def first_of(count: int) -> list[int]:
        first: list[int] = []
        async with TorchPolicy(TinyModel, EOS).open(Worker()) as engine, anyio.create_task_group() as tasks:
            for token in range(2, count + 1):
                tasks.start_soon(one, engine, prompt(token), 30)
            first += (await one(engine, prompt(1), 20)).tokens.tolist()
            tasks.cancel_scope.cancel()
        return first

    assert await first_of(1) == await first_of(5)


async def test_greedy_and_seeded_rows_do_not_change_what_later_rows_draw() -> None:
    async def last_of(*options: dict[str, Any]) -> list[int]:
        async with TorchPolicy(TinyModel, EOS).open(Worker()) as engine:
            completions = [await one(engine, prompt(1), 20, **each) for each in options]
        return [int(token) for token in completions[-1].tokens]

    assert await last_of({}) == await last_of({"greedy": True}, {"seed": 4}, {})
    assert await last_of({}) != await last_of({}, {})


async def conversations(rounds: Sequence[int] | None) -> tuple[list[list[Completion]], list[int]]:
    """Return the completions of several conversations, and the rows of each pass.

    The event loop runs `rounds` times during the passes: a clock would let it run now more often, now less.
    """
    model = Watched(context=200)
    model.rounds = None if rounds is None else iter([*rounds] * 1000)
    talks: list[list[Completion]] = [[] for _ in range(6)]

    async def talk(engine: Engine, number: int, said: list[Completion]) -> None:
        given = prompt(*range(1, number + 2))
        for turn in range(4):
            for _ in range(5 * number):  # as environments of which one is slower than the other
                await checkpoint()
            said.append(await one(engine, given, 2 + (3 * number + 5 * turn) % 9))
            given = np.concatenate([given, said[-1].tokens])

    async with TorchPolicy(lambda: model, EOS, seed=5).open(Worker()) as engine, anyio.create_task_group() as tasks:
        for number, said in enumerate(talks):
            tasks.start_soon(talk, engine, number, said)
    return talks, model.rows


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("rounds", [[1], [0, 7, 2], [40]], ids=["fast", "uneven", "slow"])
async def test_rows_that_are_sampled_together_depend_on_the_requests_alone(rounds: list[int]) -> None:
    expected, expected_rows = await conversations(None)

    talks, rows = await conversations(rounds)

    assert rows == expected_rows
    for said, others in zip(talks, expected, strict=True):
        for completion, other in zip(said, others, strict=True):
            assert completion.tokens.tolist() == other.tokens.tolist()
            assert completion.logprobs is not None
            assert other.logprobs is not None
            assert completion.logprobs.tobytes() == other.logprobs.tobytes()


async def test_a_request_that_comes_from_outside_joins_at_the_next_token() -> None:
    model, later = Watched(), list[int]()

    async with TorchPolicy(lambda: model, EOS).open(Worker()) as engine, anyio.create_task_group() as tasks:

        async def ask() -> None:
            await one(engine, prompt(3), 2)
            later.append(len(model.rows))

        async def request() -> None:
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()

        model.before = {3: request}
        await one(engine, prompt(1), 20)

    assert model.rows[:8] == [1, 1, 1, 1, 1, 2, 1, 1]
    assert later == [6]


async def test_rows_that_come_and_go_are_never_more_than_max_rows() -> None:
    model, ended = Watched(), list[int]()

    async def ask(engine: Engine, longest: int) -> None:
        ended.append(len((await one(engine, prompt(longest), longest)).tokens))

    async with TorchPolicy(lambda: model, EOS, max_rows=3).open(Worker()) as engine, anyio.create_task_group() as tasks:
        for longest in (9, 1, 4, 2, 7, 3, 5):
            tasks.start_soon(ask, engine, longest)

    assert sorted(ended) == [1, 2, 3, 4, 5, 7, 9]
    assert max(model.rows) == 3
    assert len(model.rows) < 9 + 7


async def test_rows_of_a_group_wait_for_each_other_so_that_their_prompt_is_read_once() -> None:
    model = Watched()
    policy = TorchPolicy(lambda: model, EOS, max_rows=16)

    async with policy.open(Worker()) as engine, anyio.create_task_group() as tasks:
        for longest in range(2, 18):
            tasks.start_soon(one, engine, prompt(longest % 10, longest // 10), longest)
        for token in (2, 3):
            tasks.start_soon(partial(engine.generate, [prompt(token, 5)] * 2, SamplingParams(max_completion_tokens=30)))

    assert model.rows.count(1) == 2


async def test_a_cancelled_row_leaves_while_the_others_go_on_and_its_tokens_are_counted() -> None:
    model, scope, lengths, context = Watched(), anyio.CancelScope(), list[int](), Context()

    async def ask(engine: Engine) -> None:
        with scope:
            await one(engine, prompt(1), 50)

    async def cancel() -> None:
        scope.cancel()
        await anyio.wait_all_tasks_blocked()

    model.before = {4: cancel}
    with entered(context):
        async with TorchPolicy(lambda: model, EOS).open(Worker()) as engine, anyio.create_task_group() as tasks:
            tasks.start_soon(ask, engine)
            lengths.append(len((await one(engine, prompt(2), 10)).tokens))

    assert lengths == [10]
    assert model.rows == [2] * 5 + [1] * 5
    metrics = context.metrics.emit(0)
    assert (metrics["rollout/tokens"], metrics["rollout/dropped_tokens/cancelled"]) == (15, 5)


async def test_a_row_that_is_returned_to_a_call_that_is_cancelled_is_counted() -> None:
    context = Context()

    async def cancel_other(engine: Engine) -> None:
        await one(engine, prompt(1), 3)
        other.cancel()  # of asyncio's, as servers do at their end

    with entered(context):
        async with TorchPolicy(TinyModel, EOS).open(Worker()) as engine:
            cancelling = asyncio.ensure_future(cancel_other(engine))
            other = asyncio.ensure_future(one(engine, prompt(2), 3))
            await asyncio.wait([cancelling, other])

    assert other.cancelled()

    metrics = context.metrics.emit(0)
    assert (metrics["rollout/tokens"], metrics["rollout/dropped_tokens/cancelled"]) == (6, 3)


async def test_prompts_that_cannot_be_read_fail_their_own_calls_alone() -> None:
    model = Watched()

    async def talk(engine: Engine) -> None:
        await one(engine, prompt(1), 2)
        with pytest.raises(IndexError):
            await one(engine, prompt(*[1] * 65), 1)

    async with TorchPolicy(lambda: model, EOS).open(Worker()) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(talk, engine)
        check_logprobs(prompt(2), await one(engine, prompt(2), 12))


class Plain:
    """A cache with `length` and `keep` alone."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self.append = cache.append
        self.keep = cache.keep

    @property
    def length(self) -> int:
        return self._cache.length


class OfPlain(Watched):
    def new_cache(self, batch: int, capacity: int) -> Any:
        return Plain(super().new_cache(batch, capacity))


async def test_rows_of_a_cache_that_cannot_be_joined_are_returned_one_by_one_and_begin_together() -> None:
    model, returned = OfPlain(), list[int]()

    async def talk(engine: Engine, first: int, second: int) -> None:
        for longest in (first, second):
            await one(engine, prompt(longest), longest)
            returned.append(len(model.rows))

    async with TorchPolicy(lambda: model, EOS).open(Worker()) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(talk, engine, 2, 3)
        tasks.start_soon(talk, engine, 8, 4)

    assert returned == [2, 8, 11, 12]
    assert model.rows == [2, 2] + [1] * 6 + [2] * 3 + [1]


async def test_rows_that_join_have_their_own_parameters() -> None:
    async def sampled(*, together: bool) -> list[list[int]]:
        found: list[Completion] = []
        options: list[dict[str, Any]] = [
            {"greedy": True},
            {"seed": 1, "top_k": 2},
            {"seed": 2, "repetition_penalty": 4.0, "temperature": 0.5},
        ]

        async def talk(engine: Engine, each: dict[str, Any], wait: int) -> None:
            if together:
                await one(engine, prompt(5), wait)
            found.append(await one(engine, prompt(1, 2), 12, **each))

        async with TorchPolicy(TinyModel, EOS).open(Worker()) as engine:
            if together:
                async with anyio.create_task_group() as tasks:
                    for number, each in enumerate(options):
                        tasks.start_soon(talk, engine, each, 2 + 3 * number)
            else:
                for each in options:
                    await talk(engine, each, 0)
        assert {completion.stop_reason for completion in found} == {StopReason.LENGTH}
        return [completion.tokens.tolist() for completion in found]

    assert await sampled(together=True) == await sampled(together=False)
