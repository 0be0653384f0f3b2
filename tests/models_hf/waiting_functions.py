"""Functions of a configured run that print the moment at which they are called, and wait in the one of `MOMENT`."""

from __future__ import annotations

import os
import sys

import anyio

from penstock.runs import RunConfig

MOMENT = "PENSTOCK_TEST_MOMENT"

APART = 4
"""Prompts that are kept apart."""

evaluated: list[str] = []
"""Completions that evaluations of this process have scored."""


def reached(moment: str) -> bool:
    if os.environ[MOMENT] != moment:
        return False
    os.write(1, f"{moment}\n".encode())
    return True


def prepare(_: RunConfig) -> None:
    if reached("preparation"):
        sys.stdin.readline()


def moment_of(completions: list[str]) -> str:
    """Return which call it is: an evaluation scores a completion of each prompt, training a group."""
    if "I do not know." in completions:
        return "call before the run"
    if len(completions) > 1:
        return "training"
    evaluated.append(completions[0])
    return "first evaluation" if len(evaluated) <= APART else "second evaluation"


async def letters_e(completions: list[str], **_: object) -> list[float]:
    """Return the number of letters e in each completion."""
    if reached(moment_of(completions)):
        await anyio.sleep_forever()
    return [float(completion.count("e")) for completion in completions]
