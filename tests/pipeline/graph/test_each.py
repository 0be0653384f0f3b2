from __future__ import annotations

import anyio
import pytest
from anyio.lowlevel import checkpoint

from penstock import each
from penstock.errors import InvalidRecord
from penstock.testing import drive


async def double(number: int) -> int:
    return 2 * number


async def test_the_result_of_the_function_is_sent() -> None:
    assert await drive(each(double), [1, 2, 3]) == [2, 4, 6]


async def test_a_function_that_returns_none_is_an_error_with_the_remedy() -> None:
    async def forget(number: int) -> None:
        del number

    with pytest.raises(
        InvalidRecord, match=r"expected forget to return a record.*write a stage, which can leave one out"
    ):
        await drive(each(forget), [1])


async def test_at_most_so_many_calls_run_at_once() -> None:
    running, most = 0, 0

    async def watched(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await checkpoint()
        running -= 1
        return number

    out = await drive(each(watched, concurrency=3), range(20))

    assert sorted(out) == list(range(20))
    assert most == 3


async def test_with_concurrency_results_leave_as_they_are_ready() -> None:
    second_is_done = anyio.Event()

    async def slow_first(number: int) -> int:
        if number == 1:
            await second_is_done.wait()
        else:
            second_is_done.set()
        return number

    assert await drive(each(slow_first, concurrency=2), [1, 2]) == [2, 1]


async def test_an_exception_comes_out_as_it_was_raised() -> None:
    async def fail(number: int) -> int:
        if number == 2:
            raise ValueError("no verdict")
        return number

    with pytest.raises(ValueError, match="no verdict"):
        await drive(each(fail, concurrency=4), [1, 2, 3])


def test_less_than_one_call_at_a_time_is_refused() -> None:
    with pytest.raises(ValueError, match="concurrency: expected a whole number of at least 1, got 0"):
        each(double, concurrency=0)


def test_the_stage_is_called_like_the_function_and_knows_what_it_returns() -> None:
    info = each(double).stage_info()

    assert (info.name, info.output_type) == ("double", int)
