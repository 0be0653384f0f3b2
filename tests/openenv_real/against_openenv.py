"""OpenEnv: an environment at its server as steps, and its capture proxy: `make test-agents` runs this file."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from tests.agents_real.against_openai import Chats
from tests.agents_real.calculator import USER, Ran, run
from tests.ports import free_port

from penstock import StopReason, Trajectory
from penstock.agents import AgentClient, OpenEnvEnvironment
from penstock.chat import ChatFormat
from penstock.errors import PenstockError

openai: Any = import_module("openai")
httpx: Any = import_module("httpx")
capture: Any = import_module("openenv.core.harness.capture.server")
export: Any = import_module("openenv.core.harness.capture.export")

MANY = 100
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


def test_a_step_never_reaches_a_session_without_the_episode() -> None:
    with serving() as url:
        session = sums_at(url)()
        session.reset(seed=1)
    with serving(int(url.rpartition(":")[2])):
        with pytest.raises(PenstockError, match=f"{url}: the server ended the session before it answered step"):
            session.step("It is 5.")
        first, _ = session.reset(seed=1)
        session.close()

    assert re.fullmatch(r"\d+\+\d+", first)


def test_more_sessions_than_the_server_has_are_refused_with_the_remedy(url: str) -> None:
    sessions = [sums_at(url)() for _ in range(SESSIONS + 1)]

    with pytest.raises(PenstockError, match=f"{url} refuses reset: .* larger max_concurrent_envs"):
        [session.reset(seed=0) for session in sessions]
    for session in sessions:
        session.close()


@dataclass
class Captured:
    """Has OpenEnv's capture proxy in front of the rollout, and keeps what it has recorded of each."""

    recorded: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def __call__(self) -> Captured:
        return self

    async def drive(self, _: int, client: AgentClient) -> float:
        proxy = capture.create_app(llm_url=client.base_url, model="policy", api_key=client.api_key)
        session = proxy.state.registry.create()
        transport = httpx.ASGITransport(proxy)
        async with (
            httpx.AsyncClient(transport=transport) as http,
            openai.AsyncOpenAI(base_url="http://proxy/v1", api_key=session.session_id, http_client=http) as api,
        ):
            reward = await Chats().converse(api)
        await proxy.state.inference.aclose()
        self.recorded[client.repetition] = export.export_session(session)["sequences"]
        return reward

    def pairs(self, ran: Ran) -> Iterator[tuple[Trajectory, dict[str, Any]]]:
        """Return the sequences that train, each with that of the proxy of the same tokens."""
        assert len(ran.group) == sum(map(len, self.recorded.values()))
        for row, rollout in zip(ran.group, ran.group.rollout_ids.tolist(), strict=True):
            (found,) = [each for each in self.recorded[rollout] if each["input_ids"] == row.tokens.tolist()]
            yield row, found


async def test_ids_masks_and_log_probabilities_are_those_of_the_capture_proxy(chat: ChatFormat) -> None:
    env = Captured()

    ran = await run(env, chat, group_size=MANY)

    ran.trains_once()
    for row, recorded in env.pairs(ran):
        assert row.loss_mask.tolist() == [mask == 1 for mask in recorded["loss_mask"]]
        assert row.behavior_logprobs is not None
        np.testing.assert_allclose(np.where(row.loss_mask, row.behavior_logprobs, 0), recorded["logprobs"], atol=1e-6)
