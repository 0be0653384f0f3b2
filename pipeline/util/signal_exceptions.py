"""Tell an exception that a signal raised, in whatever code the main thread was running, from one of that code."""

from __future__ import annotations

import opcode
import signal
import threading
from collections.abc import Iterator
from functools import partial
from types import CodeType, TracebackType
from typing import Any

_RAISE = opcode.opmap["RAISE_VARARGS"]
"""The instruction of a `raise` statement."""


def raised_by_signal(error: BaseException) -> bool:
    """Return whether a signal raised `error`: a handler of its own, or Python's with KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        return False
    places = list(_places(error))
    # 1. A handler in Python has a frame of its own, within the code that it interrupted.
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    if any(place.tb_frame.f_code in handlers for place in places):
        return True
    # 2. Python's own has none: the interrupted code is at any instruction but a `raise`.
    if not isinstance(error, KeyboardInterrupt) or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    return not (places and places[-1].tb_frame.f_code.co_code[places[-1].tb_lasti] == _RAISE)


def _places(error: BaseException) -> Iterator[TracebackType]:
    """Yield the places of the traceback; the last one raised."""
    place = error.__traceback__
    while place is not None:
        yield place
        place = place.tb_next


def _code_of(handler: Any) -> CodeType | None:
    """Return the code of a function, a method or a partial of either; None for other callables."""
    while isinstance(handler, partial):
        handler = handler.func
    code = getattr(getattr(handler, "__func__", handler), "__code__", None)
    return code if isinstance(code, CodeType) else None
