"""The loop of a process that answers requests of the one that started it; the child's side of `call_process.py`.

Requests and replies are lines of JSON. The first reply says that the process is ready.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

import msgspec

from .worker import die_with


def reply_to(parent: str, prepare: Callable[[], object], reply: Callable[[bytes], msgspec.Struct]) -> None:
    """Call `prepare`, and then answer each line by `reply`, until `parent` closes the pipe.

    Without a `parent`, a subreaper has started this process, which dies with it.
    """
    if parent:
        die_with(int(parent))
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent ends this process
    # Nobody reads the reply of a parent that is gone.
    with os.fdopen(os.dup(1), "wb", buffering=0) as replies, suppress(BrokenPipeError):
        os.dup2(2, 1)  # for whatever a library prints
        prepare()
        replies.write(b"{}\n")
        for line in sys.stdin.buffer:
            replies.write(msgspec.json.encode(reply(line)) + b"\n")
