"""Do one rollout of an environment before a run, with a made-up model: an error in it is found in a second.

It runs in a process, of the interpreter of the workers: one that hangs or dies takes nothing else with it.
`trial_process.py` is the child's side.
"""

from __future__ import annotations

import os
from functools import partial

import anyio
import anyio.to_thread

from ..._pipeline import errors
from ..._pipeline.errors import CallProcessDied, InvalidConfig, PenstockError
from ..._pipeline.workers.call_process import Callee, CallProcess
from ..._pipeline.workers.worker_payload import write_payload
from ..._schemas.conversion import decode_json
from . import trial_process
from .driving_environments import PATIENCE_S
from .source_env import SourceEnv
from .trial_process import TrialReply, environments_of

LONGEST_REPLY = 2**26
"""Bytes; a rollout as text."""


async def try_environments(source: SourceEnv, python: str | None, start_timeout_s: float) -> list[str]:
    """Do the first rollout of each environment of `source`, and return each as text.

    These are the one that trains, or those of a mixture, and those of its evaluation that bring their prompts.

    Args:
        source: the source, as workers get it.
        python: path of the interpreter of the workers; None for this one.
        start_timeout_s: seconds that a process may take to load the source.

    Raises:
        InvalidConfig: the source cannot be loaded there, or a rollout failed, or none can begin.
        MissingExtra: an environment or an agent needs one.
    """
    payload = await anyio.to_thread.run_sync(partial(write_payload, source, prepared=python is None))
    try:
        path = f"/proc/{os.getpid()}/fd/{payload}"
        return [await _tried(key, path, source, python, start_timeout_s) for key in environments_of(source)]
    finally:
        os.close(payload)


async def _tried(key: str, path: str, source: SourceEnv, python: str | None, start_timeout_s: float) -> str:
    """Do a rollout in a process: some packages know one event loop in each."""
    callee = Callee(
        trial_process.__name__,
        "a rollout with a made-up model",
        "penstock",
        starts_others=True,
        python=python,
        longest_reply=LONGEST_REPLY,
    )
    process = await CallProcess.start(callee)
    try:
        await _asked(process, path, f"environment: expected what {python or 'a worker'} can load", start_timeout_s)
        expected, timeout_s = f"{key}: expected a rollout with a made-up model", source.rollout_timeout_s + PATIENCE_S
        return await _asked(process, key, expected, timeout_s)
    finally:
        await process.close()


async def _asked(process: CallProcess, request: str, expected: str, timeout_s: float) -> str:
    """Return the rollout of a reply."""
    try:
        with anyio.fail_after(timeout_s):
            reply = decode_json(await process.ask(request), TrialReply)
    except TimeoutError:
        raise InvalidConfig(f"config: {expected}, got none within {timeout_s:g} s, in which its process hung") from None
    except CallProcessDied as error:
        raise InvalidConfig(f"config: {expected}, got the end of its process: {error}") from error
    if reply.got:
        raise InvalidConfig(f"config: {expected}, got {reply.got}")
    if reply.error_type:
        kind: type[PenstockError] = getattr(errors, reply.error_type)
        raise kind(reply.error)
    return reply.rollout
