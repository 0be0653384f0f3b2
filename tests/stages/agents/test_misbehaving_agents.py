"""Of agents that hang, leave processes and sockets, or are killed, nothing is left, and the others go on."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.processes.children import children_of
from tests.stages.agents import misdeeds
from tests.stages.agents.misbehaving_agents import blocks, waits
from tests.stages.agents.misdeeds import MISDEEDS
from tests.stages.agents.says import Says
from tests.stages.agents.served import chat_format

from penstock import SourceEnv
from penstock.agents import AgentCommand, AgentEnv
from penstock.chat import ChatFormat
from penstock.data import PromptDataset
from penstock.environments import EnvironmentMixture
from penstock.testing import drive_source

PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture
def chat(tmp_path: Path) -> ChatFormat:
    return chat_format(tmp_path)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of temporary files."""
    (folder := tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def sockets() -> set[str]:
    return {link for each in Path("/proc/self/fd").iterdir() if "socket" in (link := _link(each))}


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except FileNotFoundError:  # the descriptor of the listing itself
        return ""


@contextmanager
def orphans_are_ours() -> Iterator[None]:
    """Have processes whose parents died become children of this one."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


AGENTS: dict[str, tuple[Any, int]] = {
    "program": (AgentCommand([sys.executable, "-I", misdeeds.__file__]), 6),
    "waits": (waits, 3),
    "blocks": (blocks, 3),
}
"""Each with its share of the rollouts."""


async def test_nothing_is_left_of_programs_that_leave_processes_and_sockets_or_are_killed(
    chat: ChatFormat, temporary: Path
) -> None:
    deeds = [deed for deed in MISDEEDS if deed != "hangs"] * 2

    await expect_nothing_left(["program", "waits"], deeds, 60.0, chat, temporary)


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_nothing_is_left_of_a_thousand_rollouts_of_which_a_tenth_misbehaves(
    chat: ChatFormat, temporary: Path
) -> None:
    deeds = [MISDEEDS[number // 10 % len(MISDEEDS)] if number % 10 == 0 else "" for number in range(1000)]

    groups = await expect_nothing_left(list(AGENTS), deeds, 30.0, chat, temporary)

    assert groups >= 0.9 * len(deeds)


async def expect_nothing_left(
    names: Sequence[str],
    deeds: Sequence[str],
    timeout_s: float,
    chat: ChatFormat,
    temporary: Path,
) -> int:
    """Do a rollout for each of `deeds`; return how many succeeded."""
    rows = PromptDataset([{"prompt": "?", "does": each} for each in deeds], shuffle=False)
    envs = EnvironmentMixture({name: (AgentEnv(AGENTS[name][0], rows), AGENTS[name][1]) for name in names})
    source = SourceEnv(envs, Says(chat), chat=chat, group_size=1, groups=len(deeds), concurrency=16)
    await anyio.run_process([sys.executable, "-c", ""])  # the first one starts the process that forks for all tests
    children, before = children_of(os.getpid()), sockets()

    with orphans_are_ours():
        ran = await drive_source(replace(source, rollout_timeout_s=timeout_s))
        left = set(children_of(os.getpid())) - set(children)

    assert not left
    assert sockets() <= before
    assert not os.listdir(temporary)  # noqa: PTH208 (nothing runs beside it)
    assert len(ran) + ran.ledger.balance().ended["failed"] == len(deeds)
    return len(ran)
