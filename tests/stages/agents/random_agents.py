"""An agent that runs a random program over HTTP, and a policy for it: a tiny model that thinks and ends often."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import torch
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint
from tests.models_hf.chat_templates import CHATML, QWEN, THINKING_AHEAD, tokenizer_folder
from tests.tiny_model import TinyModel
from tokenizers import Tokenizer

from penstock.agents import AgentClient, Outcome
from penstock.chat import ChatFormat
from penstock.policies import PretrainedTokenizer

LAST_DIFFERS = CHATML.replace("message['content'] +", "message['content'] + (' /now' if loop.last else '') +")

TEMPLATES = {
    "chatml": CHATML,
    "strips thinking, merges results": QWEN,
    "begins thinking": THINKING_AHEAD,
    "last turn differs": LAST_DIFFERS,
}

THOUGHTS = ["<think>", "</think>"]

VOCABULARY, CONTEXT = 300, 512


def chat_that_thinks(folder: Path, template: str, **options: Any) -> ChatFormat:
    """Return the format of a tokenizer of bytes that has tokens around thoughts."""
    path = tokenizer_folder(folder / "tokenizer", template)
    tokenizer: Any = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens(THOUGHTS)
    tokenizer.save(str(path / "tokenizer.json"))
    return ChatFormat(PretrainedTokenizer(path), **options)


class Thinks(TinyModel):
    """A model that likes letters, thoughts, and the end of its turn."""

    def __init__(self, liked: Sequence[int]) -> None:
        super().__init__(vocabulary=VOCABULARY, context=CONTEXT)
        with torch.no_grad():
            self.head.bias[list(liked)] += 4


def liked_by(chat: ChatFormat) -> list[int]:
    """Return the tokens of the model's liking."""
    return [chat.tokenizer.eos_id, *chat.tokenizer.encode("".join([*THOUGHTS, *"abcde"]))]


class Killed(Exception):
    """The agent dies."""


@dataclass(eq=False)
class RandomAgent:
    """Appends, edits, compacts, forks, asks for several answers, at once, again and in vain, and dies at times."""

    strays: TaskGroup
    """Calls that outlive their rollouts."""
    session: aiohttp.ClientSession
    seed: int = 0
    seen: dict[str, list[int]] = field(default_factory=dict)
    """Tokens of the answers that arrived, by call, of rollouts that did not die."""

    async def drive(self, task: int, client: AgentClient) -> Outcome:
        """Run one program."""
        program = _Program(self, client, random.Random(f"{self.seed} {task} {client.repetition}"))  # noqa: S311
        outcome = await program.run()
        prefix = f"{task} {client.repetition} "
        self.seen.update({} if outcome.drop else {prefix + call: tokens for call, tokens in program.seen.items()})
        return outcome


class _Program:
    def __init__(self, agent: RandomAgent, client: AgentClient, made: random.Random) -> None:
        self._agent = agent
        self._url = client.base_url
        self._made = made
        self._histories: list[list[Any]] = [[self._user()]]
        self.seen: dict[str, list[int]] = {}

    async def run(self) -> Outcome:
        steps = [self._append] * 4 + [self._edit, self._compact, self._fork, self._parallel, self._several]
        steps += [self._retry, self._cancel, self._tokens, self._results]
        for _ in range(self._made.randint(1, 8)):
            if self._made.random() < 0.02:
                raise Killed
            await self._made.choice(steps)()
        if self._made.random() < 0.1:
            self._agent.strays.start_soon(self._in_vain, self._body(self._history()))
            for _ in range(self._made.randrange(20)):
                await checkpoint()
        return Outcome(reward=float(self._made.random() < 0.5), drop="no luck" if self._made.random() < 0.03 else "")

    # -- steps ---------------------------------------------------------------------------------------------------------

    async def _append(self) -> None:
        history = self._history()
        for message in await self._ask(history):
            history += [message, self._user()]

    async def _edit(self) -> None:
        history = [dict(message) for message in self._history()]
        self._made.choice(history)["content"] = self._text()
        self._histories.append(history)
        await self._ask(history)

    async def _compact(self) -> None:
        self._histories.append([*self._history()[:1], self._user()][-self._made.randint(1, 2) :])
        await self._ask(self._histories[-1])

    async def _fork(self) -> None:
        history = self._history()
        self._histories.append([*history[:-1], self._user()])
        await self._append()

    async def _parallel(self) -> None:
        async with anyio.create_task_group() as calls:
            for _ in range(self._made.randint(2, 3)):
                calls.start_soon(self._ask, self._history())

    async def _several(self) -> None:
        history = self._history()
        for message in await self._ask(history, n=self._made.randint(2, 3)):
            if self._made.random() < 0.5:
                self._histories.append([*history, message, self._user()])

    async def _retry(self) -> None:
        history = self._history()
        body = self._body(history)
        await self._cancelled(body)
        for message in await self._ask(history, body, headers={"x-stainless-retry-count": "1"}):
            history += [message, self._user()]

    async def _cancel(self) -> None:
        await self._cancelled(self._body(self._history()))

    async def _tokens(self) -> None:
        body = {"prompt": self._made.choices(range(97, 103), k=3), "max_tokens": 3, "return_token_ids": True}
        await self._post("/completions", body)

    async def _results(self) -> None:
        """Go on with results of tools, after calls that the policy did not sample, or after its turn."""
        history = self._history()[:-1]
        if not history:
            return
        functions = [{"name": "add", "arguments": "{}"} for _ in range(self._made.randint(1, 2))]
        calls = [{"id": f"c{place}", "type": "function", "function": each} for place, each in enumerate(functions)]
        said = {"role": "assistant", "content": "", "tool_calls": calls}
        new = [{"role": "tool", "tool_call_id": call["id"], "content": self._text()} for call in calls]
        self._histories.append([*history, *([self._user(), said] if self._made.random() < 0.5 else []), *new])
        await self._ask(self._histories[-1])

    # -- calls ---------------------------------------------------------------------------------------------------------

    async def _ask(self, history: Sequence[Any], body: Any = None, **fields: Any) -> list[Any]:
        headers = fields.pop("headers", None)
        answer = await self._post("/chat/completions", (body or self._body(history)) | fields, headers)
        return [choice["message"] for choice in answer["choices"]]

    async def _post(self, path: str, body: Any, headers: Any = None) -> Any:
        async with self._agent.session.post(self._url + path, json=body, headers=headers) as came:
            answer = await came.json()
        if came.status == 400:
            assert answer["error"]["code"] == "context_length_exceeded", answer
            self._histories = [[self._user()]]
            return {"choices": []}
        assert came.status == 200, answer
        self.seen.update({choice["call_id"]: choice["token_ids"] for choice in answer["choices"]})
        return answer

    async def _cancelled(self, body: Any) -> None:
        """Send a request, and hang up."""
        async with anyio.create_task_group() as calls:
            calls.start_soon(self._in_vain, body)
            for _ in range(self._made.randrange(30)):
                await checkpoint()
            calls.cancel_scope.cancel()

    async def _in_vain(self, body: Any) -> None:
        async with self._agent.session.post(self._url + "/chat/completions", json=body) as came:
            await came.read()

    def _body(self, history: Sequence[Any]) -> dict[str, Any]:
        fields: dict[str, Any] = {"messages": list(history), "max_tokens": self._made.randint(1, 12)}
        if self._made.random() < 0.3:
            fields["temperature"] = self._made.choice([0.5, 0.8, 1.2])
        if self._made.random() < 0.2:
            fields["seed"] = self._made.randrange(100)
        return fields | {"return_token_ids": True}

    def _history(self) -> list[Any]:
        return self._made.choice(self._histories[-4:])

    def _user(self) -> dict[str, Any]:
        return {"role": "user", "content": self._text()}

    def _text(self) -> str:
        return "".join(self._made.choices("abc <>{", k=self._made.randint(1, 8)))
