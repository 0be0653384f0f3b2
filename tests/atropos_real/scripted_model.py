"""A model server with a script in place of a model: `python -m tests.atropos_real.scripted_model <tokenizer> [port]`.

It speaks what environments of Atropos ask for: OpenAI's completions and chat completions, and `/generate` as
example_trainer/vllm_api_server.py has it. Prompt log-probabilities are those of a bigram model, which teaches. Every
other answer is right, and no two are the same. The first line of its output is its URL.
"""

from __future__ import annotations

import itertools
import json
import re
import socket
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import uvicorn
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from transformers import AutoTokenizer

__all__ = ["VOCABULARY", "logprob", "reply", "teacher_logprobs"]

VOCABULARY = 300
"""Tokens that the teacher knows; the tokenizer has fewer."""

ADDITION = re.compile(r"Add (\d+) and (\d+)\.")
ASSISTANT = "<|im_start|>assistant\n"
POSITIVE = re.compile(r"SHOULD match:\n((?:  - .*\n?)+)")


def reply(prompt: str, number: int) -> str:
    """Return answer `number` to the conversation that ends `prompt`: a right one where the number is even."""
    right = number % 2 == 0
    said, _, begun = prompt.rpartition(ASSISTANT)
    asked = said.rpartition("<|im_start|>")[2]
    if not ADDITION.search(prompt) and not any(known in prompt for known in SCRIPTS):
        return "Hello."  # a client that looks whether the server is healthy
    for known, script in SCRIPTS.items():
        if known in prompt:
            return script(number, right, asked, begun)
    return think(number) + boxed(asked, right=right)


def think(number: int) -> str:
    return f"<think>\nThis is answer {number}.\n</think>\n"


def boxed(asked: str, *, right: bool) -> str:
    left, added = ADDITION.findall(asked)[-1]
    return f"The answer is \\boxed{{{int(left) + int(added) + (not right)}}}"


def regex(number: int, right: bool, asked: str, begun: str) -> str:  # noqa: ARG001, FBT001
    (listed,) = POSITIVE.findall(asked)
    strings = [re.escape(line.partition("- ")[2][1:-1]) for line in listed.splitlines()]
    return f"{think(number)}<answer>{'|'.join(strings) if right else f'never-{number}'}</answer>"


def blackjack(number: int, right: bool, asked: str, begun: str) -> str:  # noqa: ARG001, FBT001
    action = {"name": "take_action", "arguments": {"action": "hit" if number % 3 else "stick"}, "number": number}
    return f"<tool_call>\n{json.dumps(action)}\n</tool_call>"


def interleaved(number: int, right: bool, asked: str, begun: str) -> str:  # noqa: ARG001, FBT001
    if "</tool_response>" in begun:
        return "</think>\n" + boxed(asked, right="answer 0" in begun)
    left, added = ADDITION.findall(asked)[-1]
    sought = {"name": "calculator", "arguments": {"expr": f"{left} + {added}"}}
    return f"<think>answer {number % 2} of {number}\n<tool_call>{json.dumps(sought)}"


def tools(number: int, right: bool, asked: str, begun: str) -> str:  # noqa: ARG001, FBT001
    if asked.startswith("tool\n"):
        return think(number) + "Done."
    left, added = ADDITION.findall(asked)[-1]
    later = int(left) >= 100  # the second question: only the answers that were right come to it
    sought = {"name": "add", "arguments": {"a": int(left), "b": int(added) + (not right and not later)}}
    return f"{think(number)}<tool_call>\n{json.dumps(sought)}\n</tool_call>"


SCRIPTS: dict[str, Callable[[int, bool, str, str], str]] = {
    "Python-compatible regular": regex,
    "take_action": blackjack,
    "<reasoning_tools>": interleaved,
    '"name": "add"': tools,
}


def logprob(token: int) -> float:
    """Return the log-probability with which this model said `token`."""
    return -(1 + token % 7) / 8


@cache
def teacher_logprobs(previous: int) -> NDArray[np.float64]:
    """Return [V] what this model expects after a token: a distribution of its own for each."""
    logits = 3 * np.random.default_rng(previous).standard_normal(VOCABULARY)
    return np.asarray(logits - np.log(np.exp(logits).sum()))


def teacher_candidates(previous: int, token: int, count: int) -> dict[int, float]:
    """Return what this model expected in place of `token`: the `count` likeliest, and the token itself."""
    logprobs = teacher_logprobs(previous)
    likeliest = np.argsort(logprobs)[-count:]
    return {int(candidate): float(np.float32(logprobs[candidate])) for candidate in (*likeliest, token)}


class Model:
    """The endpoints."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.numbers = itertools.count()

    def answers(self, prompt: str, asked: dict[str, Any]) -> list[str]:
        return [reply(prompt, next(self.numbers)) for _ in range(asked.get("n") or 1)]

    async def chat(self, request: Request) -> JSONResponse:
        asked = await request.json()
        prompt = self.tokenizer.apply_chat_template(asked["messages"], tokenize=False, add_generation_prompt=True)
        choices = [{"message": {"role": "assistant", "content": text}} for text in self.answers(prompt, asked)]
        return completion("chat.completion", asked, choices)

    async def complete(self, request: Request) -> JSONResponse:
        asked = await request.json()
        choices = [{"text": text, "logprobs": None} for text in self.answers(asked["prompt"], asked)]
        return completion("text_completion", asked, choices)

    async def generate(self, request: Request) -> JSONResponse:
        asked = await request.json()
        ids = asked["prompt"]["prompt_token_ids"]
        if "prompt_logprobs" in asked:
            return JSONResponse({"prompt_logprobs": expected(ids, asked["prompt_logprobs"]), "text": [""]})
        texts = self.answers(self.tokenizer.decode(ids), asked)
        said = [[*self.tokenizer.encode(text), self.tokenizer.eos_token_id] for text in texts]
        logprobs = [[[{token: logprob(token)}] for token in tokens] for tokens in said]
        return JSONResponse({"text": texts, "logprobs": logprobs, "finish_reasons": ["stop"] * len(texts)})

    async def health(self, _: Request) -> JSONResponse:
        return JSONResponse({})


def expected(ids: list[int], count: int) -> list[dict[int, float] | None]:
    """Return the candidates of each token; the first one has none."""
    return [None, *(teacher_candidates(previous, token, count) for previous, token in itertools.pairwise(ids))]


def completion(kind: str, asked: dict[str, Any], choices: list[dict[str, Any]]) -> JSONResponse:
    numbered = [choice | {"index": index, "finish_reason": "stop"} for index, choice in enumerate(choices)]
    return JSONResponse({"id": "1", "object": kind, "created": 0, "model": asked["model"], "choices": numbered})


def main(tokenizer: str, port: str = "0") -> None:
    """Serve on loopback, until the process is ended."""
    model = Model(AutoTokenizer.from_pretrained(tokenizer))
    routes = [
        Route("/v1/chat/completions", model.chat, methods=["POST"]),
        Route("/v1/completions", model.complete, methods=["POST"]),
        Route("/generate", model.generate, methods=["POST"]),
        Route("/health", model.health),
    ]
    with socket.create_server(("127.0.0.1", int(port))) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)  # noqa: T201 (its caller reads it)
        config = uvicorn.Config(Starlette(routes=routes), log_level="warning")
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main(*sys.argv[1:])
