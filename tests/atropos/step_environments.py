"""Environments of Atropos' shape over the modules of `stand_in`: what the step-wise adapter is tried with."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

STAND_IN = Path(__file__).parent / "stand_in"
"""For `sys.path`: atroposlib's base of servers and openai's answers, in a few lines."""

END = "\0"


class Letters:
    """As a tokenizer of transformers: one id a letter, a template with marks, and a token at the beginning of texts."""

    chat_template = "{role}: {content}"
    eos_token = END
    eos_token_id = 0
    beginning = 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [self.beginning] * add_special_tokens + [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Any = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
    ) -> str:
        assert not tokenize
        text = f"<tools>{tools}{END}" if tools else ""
        text += "".join(f"<{message['role']}>{message['content']}{END}" for message in messages)
        return f"{text}<assistant>" if add_generation_prompt else text


class Config(SimpleNamespace):
    """Of an environment, and of its servers."""

    def model_copy(self, *, update: dict[str, Any]) -> Config:
        return Config(**vars(self) | update)


class Manager:
    """Hands every call to the first server, as Atropos' ServerManager with one server does."""

    def __init__(self, server: Any) -> None:
        self.servers = [server]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.servers[0], name)


class Environment:
    """The parts of Atropos' BaseEnv that all environments here use: its constructor, and items in order."""

    tokenizer: Any = Letters()
    server_cls: Any = None

    def __init__(self, config: Config, server_configs: list[Any], slurm: bool = True, testing: bool = False) -> None:  # noqa: FBT001, FBT002, ARG002
        self.config = config
        self.server: Any = Manager(self.server_cls(server_configs[0]))

    @classmethod
    def config_init(cls) -> tuple[Config, list[Any]]:
        return Config(group_size=4, use_wandb=True, first=0, kind=""), [Config(model_name="m")]

    async def setup(self) -> None:
        self.next = self.config.first

    async def get_next_item(self) -> Any:
        await asyncio.sleep(0)
        self.next += 1
        return {"number": self.next}

    async def postprocess_histories(self, trajectories: Any) -> Any:
        return trajectories

    async def cleanup(self) -> None: ...


class Doubling(Environment):
    """Asks for twice a number, gives a hint where the answer is wrong, and scores the second one at half."""

    async def collect_trajectory(self, item: Any) -> tuple[dict[str, Any], list[Any]]:
        messages = [{"role": "system", "content": "Double."}, {"role": "user", "content": f"{item['number']}?"}]
        for score in (1.0, 0.5):
            said = await self.server.chat_completion(messages=messages, n=1, max_tokens=5, temperature=0.7)
            answer = said.choices[0].message.content
            messages.append({"role": "assistant", "content": answer})
            if answer == str(2 * item["number"]):
                return {"scores": score, "messages": messages, "tokens": [7], "masks": [7]}, []
            messages.append({"role": "user", "content": "No, double."})
        return {"scores": 0.0, "messages": messages, "tokens": [7], "masks": [7]}, []


class Group(Environment):
    """All answers at once, with tokens; shuffled, and dropped where they are all alike."""

    async def collect_trajectories(self, item: Any) -> tuple[dict[str, Any] | None, list[Any]]:
        asked, answers, logprobs, _ = await self.server.tokens_and_logprobs_completion(
            prompt=f"{item['number']}?", n=self.config.group_size, max_tokens=9
        )
        rows = list(zip(answers, logprobs, strict=True))[::-1]
        scores = [float(self.tokenizer.decode(answer) == str(2 * item["number"])) for answer, _ in rows]
        if len(set(scores)) == 1:
            return None, []
        return {
            "tokens": [asked + answer for answer, _ in rows],
            "masks": [[-100] * len(asked) + answer for answer, _ in rows],
            "inference_logprobs": [[1.0] * len(asked) + each for _, each in rows],
            "scores": scores,
            "group_overrides": {"temperature": 0.5},
        }, []


class Texts(Environment):
    """Text to be continued, twice, and the ids of a third one."""

    async def collect_trajectory(self, item: Any) -> tuple[dict[str, Any], list[Any]]:  # noqa: ARG002
        text = "Once"
        for _ in range(2):
            said = await self.server.completion(prompt=text, max_tokens=3, stop=["."])
            text += said.choices[0].text + " and"
        ids = await self.server.tokens_and_logprobs_completion(prompt="ids")
        return {"tokens": [1], "masks": [1], "scores": 1, "images": [text, ids]}, []


class Turns(Environment):
    """Two turns of a group; a wrong answer in the first ends the episode, and answers are repeated without thoughts.

    A turn is right if it holds an x; the score is the number of right turns.
    """

    async def collect_trajectories(self, item: Any) -> tuple[dict[str, Any], list[Any]]:
        prompt = f"<user>{item['number']}{END}<assistant>"
        first = await self.server.completion(prompt=prompt, n=self.config.group_size)
        talks = [[choice.text] for choice in first.choices]
        _resuming = [talk for talk in talks if "x" in talk[0]]
        await asyncio.gather(*(self._second(prompt, talk) for talk in _resuming))
        return {
            "tokens": [[1]] * len(talks),
            "masks": [[1]] * len(talks),
            "scores": [float(sum("x" in text for text in talk)) for talk in talks],
            "messages": [[{"role": "assistant", "content": text} for text in talk] for talk in talks],
        }, []

    async def _second(self, prompt: str, talk: list[str]) -> None:
        try:
            repeated = talk[0].rpartition("</think>")[2].replace(" ", "\n")
            said = await self.server.completion(prompt=f"{prompt}{repeated}{END}<user>again{END}<assistant>")
            talk.append(said.choices[0].text)
        except Exception:  # noqa: BLE001 (as Atropos' own does)
            talk.append("")


class Parallel(Environment):
    """Conversations of two turns side by side, each in a task of its own."""

    async def collect_trajectories(self, item: Any) -> tuple[dict[str, Any], list[Any]]:  # noqa: ARG002
        talks = await asyncio.gather(*(self._talk() for _ in range(self.config.group_size)))
        scores = [float(len(talk[1]["content"] + talk[3]["content"])) for talk in talks]
        return {"tokens": [[1]] * len(talks), "masks": [[1]] * len(talks), "scores": scores, "messages": talks}, []

    async def _talk(self) -> list[dict[str, Any]]:
        messages = [{"role": "user", "content": "first"}]
        for following in ("second", ""):
            said = await self.server.chat_completion(messages=messages)
            messages.append({"role": "assistant", "content": said.choices[0].message.content})
            if following:
                messages.append({"role": "user", "content": following})
        return messages


class Steps(Environment):
    """Scores every turn by itself, and wants to see an item again."""

    async def collect_trajectories(self, item: Any) -> tuple[list[Any], list[Any]]:
        turns = []
        for number in range(2):
            said = await self.server.completion(prompt=f"{item} {number}")
            turns.append({"tokens": [[1]], "masks": [[1]], "scores": [float(said.choices[0].text)]})
        return [None, *turns], ["again"]

    async def postprocess_histories(self, trajectories: list[Any]) -> list[Any]:
        trajectories[-1]["scores"][0] += 100
        return trajectories


class Process(Environment):
    """Tells of the process that it runs in; an alarm interrupts its work there."""

    async def collect_trajectory(self, item: Any) -> tuple[dict[str, Any], list[Any]]:  # noqa: ARG002
        await self.server.completion(prompt=f"{os.getpid()} {os.getppid()}")
        signal.signal(signal.SIGALRM, self._interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        try:
            while True:
                time.sleep(1)  # noqa: ASYNC251 (as math_verify, which an alarm interrupts)
        except InterruptedError:
            return {"scores": 1.0}, []

    def _interrupt(self, *_: object) -> None:
        raise InterruptedError


@dataclass(frozen=True)
class Troubled:
    """Makes an environment that does as it is answered instead of scoring, and goes on after refusals."""

    kind: str = ""
    """The action before its first model call."""

    def __call__(self) -> Environment:
        from penstock._stages.integrations.atropos.steps.child import bridge_class  # noqa: PLC0415 (in the child alone)

        TroubledEnvironment.server_cls = bridge_class()
        return TroubledEnvironment(Config(group_size=1, first=0, kind=self.kind), [Config(model_name="m")])


class TroubledEnvironment(Environment):
    """Does as its configuration says, and as it is answered."""

    async def setup(self) -> None:
        await super().setup()
        if self.config.kind == "fail early":
            raise LookupError("no data set")
        if self.config.kind == "wait early":
            await asyncio.Event().wait()
        if self.config.kind == "block early":
            time.sleep(1000)  # noqa: ASYNC251 (that is the trouble)
        if self.config.kind == "exit early":
            os._exit(3)
        if self.config.kind == "call early":
            await self.server.completion(prompt="?")

    async def get_next_item(self) -> Any:
        if self.config.kind == "draw":
            await asyncio.Event().wait()
        return None if self.config.kind == "end" else await super().get_next_item()

    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:  # noqa: ARG002
        said = await self.server.completion(prompt=str(os.getpid()))
        outcome: tuple[Any, list[Any]] = await getattr(self, f"_{said.choices[0].text}")()
        return outcome

    async def _hang(self) -> Any:
        await asyncio.Event().wait()

    async def _block(self) -> Any:
        time.sleep(1000)  # noqa: ASYNC251 (that is the trouble)

    async def _fail(self) -> Any:
        raise ZeroDivisionError("division")

    async def _exit(self) -> Any:
        sys.exit(3)

    async def _die(self) -> Any:
        os._exit(3)

    async def _drop(self) -> Any:
        return None, []

    async def _infinite(self) -> Any:
        return {"scores": float("inf")}, []

    async def _nonsense(self) -> Any:
        return "a word", []

    async def _logprobs(self) -> Any:
        return await self._in_spite_of_errors(self.server.get_logprobs(prompt="a"))

    async def _many(self) -> Any:
        return await self._in_spite_of_errors(self.server.completion(prompt="?", n=2))

    async def _ids(self) -> Any:
        return await self._in_spite_of_errors(self.server.completion(prompt=[1, 2]))

    async def _render(self) -> Any:
        self.server.servers[0].tokenizer = None
        return await self._in_spite_of_errors(self.server.chat_completion(messages=[]))

    async def _in_spite_of_errors(self, call: Any) -> Any:
        with suppress(Exception):  # many environments do so
            await call
        return {"scores": 1.0}, []

    async def _impatient(self) -> Any:
        call = asyncio.ensure_future(self.server.completion(prompt="quick"))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        return {"scores": 1.0}, []
