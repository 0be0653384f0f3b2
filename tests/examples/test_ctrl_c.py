"""Ctrl-C as the demo takes it: it cancels what runs, once, and the script exits with 130."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import anyio
import pytest
from anyio.lowlevel import checkpoint

from arithmetic.ctrl_c import cancelled_by_ctrl_c

CTRL_C = signal.SIGINT


@pytest.fixture(autouse=True)
def _process_stays_as_it_was() -> Iterator[None]:
    before = signal.getsignal(CTRL_C)
    yield
    signal.signal(CTRL_C, before)
    gc.unfreeze()


async def test_ctrl_c_cancels_the_body_where_it_waits() -> None:
    story: list[str] = []

    async def script() -> None:
        with cancelled_by_ctrl_c() as scope:
            signal.raise_signal(CTRL_C)
            story.append("went on")
            try:
                await anyio.sleep_forever()
            finally:
                story.append(f"cancelled: {scope.cancel_called}")

    with pytest.raises(SystemExit, match="130"):
        await script()

    assert story == ["went on", "cancelled: True"]


async def test_another_ctrl_c_disturbs_neither_the_cleaning_up_nor_the_exit() -> None:
    story: list[str] = []

    async def script() -> None:
        with cancelled_by_ctrl_c():
            signal.raise_signal(CTRL_C)
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    signal.raise_signal(CTRL_C)
                    await checkpoint()
                story.append("cleaned up")

    with pytest.raises(SystemExit, match="130"):
        await script()
    signal.raise_signal(CTRL_C)

    assert story == ["cleaned up"]


async def test_ctrl_c_in_the_last_moment_cancels_nothing_and_is_an_interrupt_all_the_same() -> None:
    story: list[bool] = []

    async def script() -> None:
        with cancelled_by_ctrl_c() as scope:
            await checkpoint()
            signal.raise_signal(CTRL_C)
            story.append(scope.cancel_called)

    with pytest.raises(SystemExit, match="130"):
        await script()

    assert story == [False]


async def test_ctrl_c_does_not_hide_what_the_body_raised() -> None:
    async def script() -> None:
        with cancelled_by_ctrl_c():
            signal.raise_signal(CTRL_C)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await script()


async def test_without_ctrl_c_everything_is_as_it_was_before() -> None:
    before = signal.getsignal(CTRL_C)

    with cancelled_by_ctrl_c():
        await checkpoint()

    assert signal.getsignal(CTRL_C) is before
