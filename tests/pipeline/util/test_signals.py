from __future__ import annotations

import signal
import threading

import anyio
from tests.failsafe import FAILSAFE_S

from penstock._pipeline.util.signals import woken_by_signals


async def test_a_signal_that_does_not_interrupt_the_wait_of_the_loop_is_handled_at_once() -> None:
    handled = anyio.Event()
    before = signal.signal(signal.SIGHUP, lambda *_: handled.set())
    elsewhere = threading.Timer(0.1, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGHUP))

    try:
        with woken_by_signals(), anyio.fail_after(FAILSAFE_S):
            elsewhere.start()  # by then the loop waits, in another thread than the one that gets the signal
            await handled.wait()
    finally:
        signal.signal(signal.SIGHUP, before)

    assert signal.set_wakeup_fd(-1) == -1
