from __future__ import annotations

import anyio
import pytest

from penstock._pipeline.util.exception_groups import consists_of, first_exception, single_exception, unwrap_single


def test_the_only_exception_is_found_however_deep() -> None:
    cause = ValueError()

    assert single_exception(BaseExceptionGroup("a", [ExceptionGroup("b", [cause])])) is cause
    assert single_exception(cause) is cause


def test_several_exceptions_stay_together() -> None:
    several = ExceptionGroup("a", [ValueError(), ExceptionGroup("b", [KeyError()])])

    assert single_exception(several) is several


async def test_the_exception_of_a_single_task_is_raised_with_its_own_cause() -> None:
    async def fail() -> None:
        raise ValueError("the failure") from KeyError("its cause")

    with pytest.raises(ValueError, match="the failure") as failed, unwrap_single():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail)

    assert isinstance(failed.value.__cause__, KeyError)


def test_of_errors_of_several_workers_the_first_is_returned_with_the_others_as_notes() -> None:
    first, other = KeyError("first"), KeyError("other\nin detail")

    first_error = first_exception(ExceptionGroup("a", [first, ExceptionGroup("b", [other])]), KeyError)

    assert first_error is first
    assert first.__notes__ == ["besides: 'other\\nin detail'"]


def test_failures_of_several_kinds_stay_together() -> None:
    several = ExceptionGroup("a", [KeyError(), ValueError()])

    assert first_exception(several, KeyError) is several


def test_a_group_consists_of_a_failure_when_there_is_nothing_else_in_it() -> None:
    failure = ValueError()

    assert consists_of(ExceptionGroup("a", [failure, ExceptionGroup("b", [failure])]), failure)
    assert not consists_of(ExceptionGroup("a", [failure, KeyError()]), failure)
    assert not consists_of(ValueError(), failure)
    assert not consists_of(failure, None)
