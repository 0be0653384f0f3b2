"""Environments of Atropos' shape that import nothing of it: what the step-wise adapter is tried with."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

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
        self, messages: Sequence[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        text = "".join(f"<{message['role']}>{message['content']}{END}" for message in messages)
        return f"{text}<assistant>" if add_generation_prompt else text


@dataclass
class Config:
    group_size: int = 4
    use_wandb: bool = True
    first: int = 0


class Environment:
    """What all of them have of Atropos' BaseEnv: its constructor, and items in a row."""

    tokenizer: Any = None

    def __init__(self, config: Config, server_configs: list[Any], slurm: bool = True, testing: bool = False) -> None:  # noqa: FBT001, FBT002
        self.config = config
        self.server: Any = server_configs
        self.made_for = (slurm, testing)
        self.cleanups = 0

    @classmethod
    def config_init(cls) -> tuple[Config, list[Any]]:
        return Config(), []

    async def setup(self) -> None:
        self.next = self.config.first

    async def get_next_item(self) -> Any:
        await asyncio.sleep(0)
        self.next += 1
        return {"number": self.next}

    async def cleanup(self) -> None:
        self.cleanups += 1


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


class Rendered(Doubling):
    """The same, with a tokenizer."""

    tokenizer = Letters()


class Group(Environment):
    """As Atropos' gsm8k: all answers at once, at a managed server, shuffled, and dropped where they are all alike."""

    tokenizer = Letters()

    async def collect_trajectories(self, item: Any) -> tuple[dict[str, Any] | None, list[Any]]:
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            said = await managed.chat_completion(
                messages=[{"role": "user", "content": f"{item['number']}?"}], n=self.config.group_size, max_tokens=9
            )
            nodes = managed.get_state()["nodes"]
        answers = [choice.message.content for choice in said.choices]
        rows = list(zip(nodes, answers, strict=True))[::-1]
        scores = [float(answer == str(2 * item["number"])) for _, answer in rows]
        if len(set(scores)) == 1:
            return None, []
        return {
            "tokens": [node.tokens for node, _ in rows],
            "masks": [node.masked_tokens for node, _ in rows],
            "inference_logprobs": [node.logprobs for node, _ in rows],
            "scores": scores,
            "group_overrides": {"temperature": 0.5},
        }, []


class Managed(Environment):
    """Two turns at a managed server; what it says of them is what its state says."""

    tokenizer = Letters()

    async def collect_trajectory(self, item: Any) -> tuple[dict[str, Any], list[Any]]:  # noqa: ARG002
        messages = [{"role": "user", "content": "a"}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            first = await managed.chat_completion(messages=messages)
            messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "b"}]
            last = await managed.chat_completion(messages=messages)
            (node,) = managed.get_state()["nodes"]
        row = {"tokens": node.tokens, "masks": node.masked_tokens, "inference_logprobs": node.logprobs}
        return row | {"scores": 1.0, "overrides": {"finish": last.choices[0].finish_reason}}, []


class Respelled(Environment):
    """A chat of one turn, whose tokens the environment makes by itself, with log-probabilities that it makes up."""

    tokenizer = Letters()
    logprob = -9.0

    async def collect_trajectory(self, item: Any) -> tuple[dict[str, Any], list[Any]]:  # noqa: ARG002
        said = await self.server.chat_completion(messages=[{"role": "user", "content": "ab?"}])
        prompt, answer = ([*map(ord, text)] for text in ("ab?", said.choices[0].message.content))
        return {
            "tokens": prompt + answer,
            "masks": [-100] * len(prompt) + answer,
            "inference_logprobs": [1.0] * len(prompt) + [self.logprob] * len(answer),
            "advantages": [0.5] * len(prompt + answer),
            "scores": 1.0,
        }, []


class Texts(Environment):
    """Text to be continued, twice, and the ids of a third one."""

    tokenizer = Letters()

    async def collect_trajectory(self, item: Any) -> tuple[dict[str, Any], list[Any]]:  # noqa: ARG002
        text = "Once"
        for _ in range(2):
            said = await self.server.completion(prompt=text, max_tokens=3, stop=["."])
            text += said.choices[0].text + " and"
        ids = await self.server.tokens_and_logprobs_completion(prompt="ids")
        return {"tokens": [1], "masks": [1], "scores": 1, "images": [text, ids]}, []


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


class InTurn(Environment):
    """Asks for one answer after another, at a managed server, and scores them by their length."""

    tokenizer = Letters()

    async def collect_trajectories(self, item: Any) -> tuple[dict[str, Any], list[Any]]:  # noqa: ARG002
        async with self.server.managed_server() as managed:
            for _ in range(self.config.group_size):
                await managed.chat_completion(messages=[{"role": "user", "content": "?"}])
            nodes = managed.get_state()["nodes"]
        masks = [node.masked_tokens for node in nodes]
        scores = [float(sum(token != -100 for token in mask)) for mask in masks]
        return {"tokens": [node.tokens for node in nodes], "masks": masks, "scores": scores}, []


class Steps(Environment):
    """Scores every turn by itself, and wants to see an item again."""

    async def collect_trajectories(self, item: Any) -> tuple[list[Any], list[Any]]:
        turns = []
        for number in range(2):
            said = await self.server.chat_completion(messages=[{"role": "user", "content": f"{item} {number}"}])
            answer = said.choices[0].message.content
            turns.append({"tokens": [[1]], "masks": [[1]], "scores": [float(answer)]})
        return [None, *turns], ["again"]

    async def postprocess_histories(self, trajectories: list[Any]) -> list[Any]:
        trajectories[-1]["scores"][0] += 100
        return trajectories


@dataclass
class Trouble:
    """What an environment is made to do, and what came of it."""

    kind: str
    ended: list[str] = field(default_factory=list)
    release: SimpleQueue[None] = field(default_factory=SimpleQueue)
    """Lets go what blocks."""

    def __call__(self) -> Environment:
        return Troubled(self)


class Troubled(Environment):
    """Does as it is told instead of scoring."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__(Config(), [])
        self.trouble = trouble

    async def setup(self) -> None:
        await super().setup()
        if self.trouble.kind == "set up":
            raise LookupError("no data set")
        if self.trouble.kind == "wait":
            await asyncio.Event().wait()
        if self.trouble.kind == "block early":
            self.trouble.release.get()
        if self.trouble.kind == "call early":
            await self.server.chat_completion(messages=[])

    async def get_next_item(self) -> Any:
        if self.trouble.kind == "draw":
            await asyncio.Event().wait()
        return None if self.trouble.kind == "end" else await super().get_next_item()

    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:  # noqa: ARG002
        await self.server.chat_completion(messages=[{"role": "user", "content": "?"}])
        try:
            outcome: tuple[Any, list[Any]] = await getattr(self, f"_{self.trouble.kind}")()
            return outcome
        finally:
            self.trouble.ended.append(self.trouble.kind)

    async def _hang(self) -> Any:
        await asyncio.Event().wait()

    async def _cling(self) -> Any:
        done = asyncio.ensure_future(self._hang_in_thread())
        while not done.done():
            try:
                await asyncio.shield(done)
            except asyncio.CancelledError:
                continue
        return {"scores": 1.0}, []

    async def _block(self) -> Any:
        self.trouble.release.get()
        return {"scores": 1.0}, []

    async def _hang_in_thread(self) -> Any:
        await asyncio.to_thread(self.trouble.release.get)

    async def _fail(self) -> Any:
        raise ZeroDivisionError("division")

    async def _exit(self) -> Any:
        sys.exit(3)

    async def _drop(self) -> Any:
        return None, []

    async def _infinite(self) -> Any:
        return {"scores": float("inf")}, []

    async def _nonsense(self) -> Any:
        return "a word", []

    async def _logprobs(self) -> Any:
        await self.server.get_logprobs(prompt="a")

    async def _many(self) -> Any:
        await self.server.chat_completion(messages=[{"role": "user", "content": "?"}], n=2)

    async def _render(self) -> Any:
        async with self.server.managed_server() as managed:
            await managed.completion(prompt="a")

    async def _impatient(self) -> Any:
        call = asyncio.ensure_future(self.server.chat_completion(messages=[{"role": "user", "content": "quick"}]))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        return {"scores": 1.0}, []
