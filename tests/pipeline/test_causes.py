from __future__ import annotations

from penstock.pipeline.causes import consists_of, sole_cause


def test_the_only_exception_is_found_however_deep() -> None:
    cause = ValueError()

    assert sole_cause(BaseExceptionGroup("a", [ExceptionGroup("b", [cause])])) is cause
    assert sole_cause(cause) is cause


def test_several_exceptions_stay_together() -> None:
    several = ExceptionGroup("a", [ValueError(), ExceptionGroup("b", [KeyError()])])

    assert sole_cause(several) is several


def test_a_group_consists_of_a_failure_when_there_is_nothing_else_in_it() -> None:
    failure = ValueError()

    assert consists_of(ExceptionGroup("a", [failure, ExceptionGroup("b", [failure])]), failure)
    assert not consists_of(ExceptionGroup("a", [failure, KeyError()]), failure)
    assert not consists_of(ValueError(), failure)
    assert not consists_of(failure, None)
