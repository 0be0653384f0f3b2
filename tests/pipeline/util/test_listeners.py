"""What listens for an event is called while its `with` lasts."""

from __future__ import annotations

import pytest

from penstock._pipeline.util.listeners import Listeners


def test_each_is_called_with_the_event_in_the_order_in_which_they_came() -> None:
    saved, called = Listeners[[str]](), list[tuple[int, str]]()

    with saved(lambda name: called.append((1, name))), saved(lambda name: called.append((2, name))):
        saved.notify("step 3")

    assert called == [(1, "step 3"), (2, "step 3")]


def test_none_is_called_after_its_body_however_that_ended() -> None:
    saved, called = Listeners[[str]](), list[str]()

    with pytest.raises(ZeroDivisionError), saved(called.append):
        raise ZeroDivisionError
    saved.notify("step 3")

    assert not saved
    assert not called
