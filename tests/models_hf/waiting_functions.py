"""Functions of a configured run that print the moment at which they are called, and wait in the one of `MOMENT`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio
from tests.configured_run import STEPS

from penstock.runs import RunConfig

MOMENT = "PENSTOCK_TEST_MOMENT"


def reached(moment: str) -> bool:
    if os.environ[MOMENT] != moment:
        return False
    os.write(1, f"{moment}\n".encode())
    return True


def prepare(_: RunConfig) -> None:
    if reached("preparation"):
        sys.stdin.readline()


def moment_of(completions: list[str]) -> str:
    """Return which call it is, if none of training: a run has its last checkpoint once training has ended."""
    if "I do not know." in completions:
        return "call before the run"
    trained = Path("run/checkpoints", f"step-{STEPS:08d}").exists()
    return "second evaluation" if trained else "first evaluation"


async def letters_e(completions: list[str], **_: object) -> list[float]:
    """Return the number of letters e in each completion."""
    if reached(moment_of(completions)):
        await anyio.sleep_forever()
    return [float(completion.count("e")) for completion in completions]
