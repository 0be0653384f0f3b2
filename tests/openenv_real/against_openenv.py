"""OpenEnv: an environment at its server, as steps: `make test-agents` runs this file."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from tests.agents_real.calculator import USER, run
from tests.ports import free_port

from penstock import StopReason
from penstock.agents import OpenEnvEnvironment
from penstock.chat import ChatFormat
from penstock.errors import PenstockError

SESSIONS = 8
"""Of the server."""

sums_at = partial(OpenEnvEnvironment, action="answer", observation="question")


@contextmanager
def serving(port: int = 0) -> Iterator[str]:
    """Serve `summing` in a process of its own, and yield its URL."""
    with socket.create_server(("127.0.0.1", port)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        command = [sys.executable, "-m", "tests.openenv_real.summing", str(listening.fileno())]
        process = subprocess.Popen(command, pass_fds=[listening.fileno()])
    with process:
        try:
            sums_at(url)().close()
            yield url
        finally:
            process.kill()


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """Return the URL of one server: it takes seconds to start."""
    with serving() as found:
        yield found


def adds(prompt: str) -> str:
    """Answer the last sum."""
    a, b = map(int, re.findall(r"(\d+)\+(\d+)", prompt.rpartition(USER)[2])[-1])
    return f"It is {a + b}."


def always(said: str) -> Callable[[str], str]:
    """Return a script that says the same in every turn."""
    return lambda _: said


async def test_an_episode_is_a_sequence_with_the_rewards_of_its_steps(url: str, chat: ChatFormat) -> None:
    ran = await run(sums_at(url), chat, adds, thinks=False, group_size=SESSIONS, turn_rewards=True)

    ran.trains_once()
    for row in ran.group:
        assert row.token_rewards is not None
        assert row.token_rewards[row.token_rewards != 0].tolist() == [0.5, 0.5]
    assert len({row.tokens[: row.loss_mask.argmax()].tobytes() for row in ran.group}) == 1  # the same first question


async def test_functions_make_the_action_and_the_messages(url: str, chat: ChatFormat) -> None:
    env = OpenEnvEnvironment(
        url,
        action=lambda text: {"answer": text},
        observation=lambda observation: [{"role": "user", "content": f"Add {observation['question']}"}],
    )

    ran = await run(env, chat, adds, thinks=False)

    ran.trains_once()
    assert all("Add " in chat.tokenizer.decode(row.tokens.tolist()) for row in ran.group)


async def test_max_steps_truncates_an_episode(url: str, chat: ChatFormat) -> None:
    ran = await run(sums_at(url, max_steps=3), chat, always("go on"))

    assert not ran.failures
    assert ran.records.metrics.emit(0)["rollout/turns"] == 3
    assert [row.stop_reason for row in ran.group] == [StopReason.LENGTH] * 2


@pytest.mark.parametrize(
    ("options", "said", "message"),
    [
        ({"action": "text"}, "", "refuses step: Invalid message; answer: Field required"),
        ({"action": "text"}, "", r"see OpenEnvEnvironment\.action"),
        ({"observation": "text"}, "", "expected an observation with text, got one with metadata, question"),
        ({}, "raise", "refuses step: no such answer"),
        ({}, "go on", "the episode has not ended after 5 steps: set max_steps"),
        ({"timeout_s": 1}, "hang", "expected an answer to step within 1 s"),
    ],
)
async def test_a_rollout_that_the_server_fails_says_why_with_its_url(
    *, options: dict[str, Any], said: str, message: str, url: str, chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock._stages.agents.openenv_environment.ENDLESS", 5)

    ran = await run(sums_at(url, **options), chat, always(said), group_size=1)

    (failure,) = ran.failures
    assert url in failure
    assert re.search(message, failure)
    assert "\n" not in failure


def test_a_server_that_cannot_be_reached_is_told_when_it_is_opened() -> None:
    url = f"http://127.0.0.1:{free_port()}"

    with pytest.raises(PenstockError, match=f"{url}: expected a server of OpenEnv: .*refused"):
        sums_at(url)()
