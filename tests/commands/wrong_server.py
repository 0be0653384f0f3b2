"""An inference server that is token-exact, or wrong in one way, for `penstock doctor --endpoint`.

Its model is a table of logits by the hash of all tokens before: a few letters, some of which its tokenizer would join.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
from aiohttp import web
from tests.models_hf.chat_templates import QWEN, tokenizer_folder

from penstock.chat import ChatFormat
from penstock.errors import InvalidData
from penstock.policies import PretrainedTokenizer

LONGEST = 600
LETTERS = "ans"

NESTED = "[" * 10_000

LISTED: Mapping[str, str] = {
    "lists a text": '{"data": "abc"}',
    "lists numbers": '{"data": [1]}',
    "lists an object": '{"data": {"id": "letters"}}',
    "lists no model": '{"data": []}',
    "lists a list": "[1, 2]",
    "lists without end": NESTED,
    "lists a page": "<html>",
}
"""Answers of /v1/models."""

TOLD: Mapping[str, float] = {"tells 10**12 tokens": 10**12, "tells the bound of transformers": int(1e30)}

CHANGED: Mapping[str, Mapping[str, Any]] = {
    "ids beyond any vocabulary": {"token_ids": [2**40]},
    "log-probabilities are a list": {"logprobs": [1]},
    "a message is text": {"message": "x"},
    "a text is a number": {"text": 5},
}
"""Changes of a choice."""

EVENTS: Mapping[str, bytes] = {
    "streams what is no JSON": b"data: {not json}\n\n",
    "streams lists": b"data: [1]\n\n",
    "streams more than 4 MiB": b'data: {"choices": [{"token_ids": [1]}]}\n\n' * 120_000,
}

Logprobs = np.ndarray[Any, np.dtype[np.float64]]


def model_folder(folder: Path) -> Path:
    return tokenizer_folder(folder / "model", QWEN)


class WrongServer:
    """Answers requests; `wrong` names the way in which it is wrong."""

    def __init__(self, chat: ChatFormat, wrong: str = "") -> None:
        self._chat = chat
        self._wrong = wrong
        self._letters = [chat.tokenizer.encode(letter)[0] for letter in LETTERS]
        self._turns: dict[str, tuple[list[int], list[int]]] = {}
        """Prompt and ids of each turn, by its messages."""
        self._draws = np.random.default_rng(0)

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[str]:
        """Serve on loopback; yield the URL."""
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        for path, answer in (("chat/completions", self._chatted), ("completions", self._completed)):
            app.router.add_post(f"/v1/{path}", answer)
        if self._wrong != "no /inference/v1/generate":
            app.router.add_post("/inference/v1/generate", self._generated)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        if self._wrong == "needs a key" and request.headers.get("Authorization") != "Bearer secret":
            return refused(401, "expected a key")
        if self._wrong == "fails by an error that nests":
            return web.Response(status=500, text=NESTED)
        if self._wrong in LISTED:
            return web.Response(text=LISTED[self._wrong])
        return web.json_response({"data": [{"id": "letters", "max_model_len": TOLD.get(self._wrong, LONGEST)}]})

    # -- prompts -------------------------------------------------------------------------------------------------------

    def _prompt(self, messages: list[dict[str, Any]], tools: Any) -> list[int]:
        known = self._turns.get(json.dumps(messages[:-1]))
        if known is not None and self._wrong != "tokenizes turns again":
            prompt, sampled = known
            after = self._chat.extend(messages[:-1], messages[-1:], sampled=sampled)
            assert after is not None
            return [*prompt, *sampled, *after]
        match self._wrong:
            case "a system prompt of its own":
                messages = [{"role": "system", "content": "You are helpful."}, *messages]
            case "keeps thoughts out of prompts":
                messages = [each | {"content": each["content"].split("</think>")[-1]} for each in messages]
            case "reads one call of a turn":
                messages = [
                    each | ({"tool_calls": each["tool_calls"][:1]} if "tool_calls" in each else {}) for each in messages
                ]
            case "writes no tools":
                tools = None
        prompt = self._chat.prompt(messages, tools=tools)
        if self._wrong == "a start token twice":
            return [prompt[0], *prompt]
        if self._wrong == "special tokens are text":
            text = "".join(each["content"] for each in messages)
            end = self._chat.tokenizer.eos_id
            spelled = self._chat.tokenizer.encode("<|im_")
            if "<|im_end|>" in text:
                place = prompt.index(end)
                return [*prompt[:place], *spelled, *prompt[place + 1 :]]
        return prompt

    # -- sampling ------------------------------------------------------------------------------------------------------

    def _logprobs(self, tokens: Sequence[int], temperature: float, bias: Mapping[str, float]) -> Logprobs:
        seed = zlib.crc32(np.asarray(tokens, np.int32).tobytes())
        logits = np.full(300, -20.0)
        logits[self._letters] = np.random.default_rng(seed).normal(size=len(LETTERS))
        for token, value in bias.items():
            logits[int(token)] += value
        logits /= temperature
        logprobs: Logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        return logprobs

    def _sample(self, prompt: Sequence[int], asked: Mapping[str, Any], choice: int) -> dict[str, Any]:
        temperature = 0 if self._wrong == "ignores temperature" else asked.get("temperature", 1)
        bias = {} if self._wrong == "ignores logit_bias" else asked.get("logit_bias") or {}
        seed = asked.get("seed")
        random = self._draws if seed is None or self._wrong == "ignores seeds" else np.random.default_rng(seed + choice)
        if self._wrong == "one seed for all choices":
            random = np.random.default_rng(1)
        tokens: list[int] = []
        logprobs: list[float] = []
        finish, text = "length", ""
        stops = [] if self._wrong == "ignores stop strings" else asked.get("stop") or []
        while len(tokens) < asked.get("max_tokens", 8):
            found = self._logprobs([*prompt, *tokens], temperature or 1, bias)
            token = int(found.argmax() if not temperature else random.choice(len(found), p=np.exp(found)))
            read = 0.5 if self._wrong == "log-probabilities of another temperature" else temperature or 1
            if self._wrong == "log-probabilities of temperature 1":
                read = 1
            logprobs.append(float(self._logprobs([*prompt, *tokens], read, bias)[token]))
            tokens.append(token)
            text = self._chat.tokenizer.decode(tokens)
            if any(stop in text for stop in stops):
                finish, text = "stop", text.split(stops[0])[0]
                break
        if self._wrong == "ids end before the stop string" and finish == "stop":
            tokens, logprobs = tokens[: len(text)], logprobs[: len(text)]
        if self._wrong == "cut turns end by stop":
            finish = "stop"
        if self._wrong == "text of other tokens":
            text = text.upper()
        return {"tokens": tokens, "logprobs": logprobs, "finish": finish, "text": text}

    def _choices(self, prompt: Sequence[int], asked: Mapping[str, Any]) -> list[dict[str, Any]]:
        count = 1 if self._wrong == "ignores n" else asked.get("n", 1)
        return [self._sample(prompt, asked, number) for number in range(count)]

    def _refusal(self, prompt: Sequence[int], asked: Mapping[str, Any]) -> web.Response | None:
        if self._wrong == "refuses tools" and asked.get("tools"):
            return refused(400, "auto tool choice requires a parser")
        ranges = {"temperature": (0, 2), "top_p": (0, 1), "n": (1, 64), "max_tokens": (1, LONGEST)}
        for name, (least, most) in ranges.items():
            if not least <= asked.get(name, least) <= most and self._wrong != "ignores wrong values":
                if self._wrong == "answers wrong values by a list":
                    return web.json_response([])
                return refused(401 if self._wrong == "wants a key for wrong values" else 400, f"{name} is out of range")
        if asked.get("logit_bias") and not self._wrong:
            return refused(400, "logit_bias is not supported")
        if len(prompt) >= LONGEST and self._wrong != "cuts long prompts":
            return refused(500 if self._wrong == "fails at long prompts" else 400, "the context is exceeded")
        return None

    # -- paths ---------------------------------------------------------------------------------------------------------

    async def _chatted(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        try:
            prompt = self._prompt(asked["messages"], asked.get("tools"))
        except InvalidData as error:
            return refused(400, str(error))
        calls = [call["function"] for each in asked["messages"] for call in each.get("tool_calls", ())]
        if self._wrong == "fails at malformed calls" and not all(call["arguments"].endswith("}") for call in calls):
            return refused(500, "JSONDecodeError")
        if self._wrong == "redirects malformed calls" and not all(call["arguments"].endswith("}") for call in calls):
            return refused(307, "")
        if (no := self._refusal(prompt, asked)) is not None:
            return no
        choices = self._choices(prompt, asked)
        for choice in choices:
            choice["message"] = {"role": "assistant", "content": choice["text"]}
            self._turns[json.dumps([*asked["messages"], choice["message"]])] = (prompt, choice["tokens"])
        if asked.get("stream"):
            return await self._streamed(request, choices)
        return self._answer(prompt, [self._choice(number, each, chat=True) for number, each in enumerate(choices)])

    async def _streamed(self, request: web.Request, choices: Sequence[Mapping[str, Any]]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        (choice,) = choices
        await response.write(EVENTS.get(self._wrong, b""))
        for place, token in enumerate(choice["tokens"]):
            if self._wrong == "streams lose a token" and place == 3:
                continue
            ids = {} if self._wrong == "streams without ids" else {"token_ids": [token]}
            part = {"choices": [{"index": 0, "delta": {"content": "a"}, **ids}]}
            await response.write(f"data: {json.dumps(part)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _completed(self, request: web.Request) -> web.Response:
        asked = await request.json()
        prompt = asked["prompt"]
        if self._wrong == "never answers":
            await anyio.sleep_forever()
        if self._wrong == "wants a key for completions":
            return refused(401, "expected a key")
        if isinstance(prompt, str):
            text = prompt.replace("é", "e") if self._wrong == "another tokenizer" else prompt
            prompt = self._chat.tokenizer.encode(text)
        elif self._wrong == "changes prompts of ids":
            prompt = [self._chat.tokenizer.eos_id, *prompt]
        if (no := self._refusal(prompt, asked)) is not None:
            return no
        choices = [self._choice(number, each) for number, each in enumerate(self._choices(prompt, asked))]
        if asked.get("prompt_logprobs") is not None and self._wrong != "no log-probabilities of prompts":
            read = [self._logprobs(prompt[:place], 1, {})[token] for place, token in enumerate(prompt)]
            named = [{str(token): {"logprob": value}} for token, value in zip(prompt, read, strict=True)]
            choices[0]["prompt_logprobs"] = [None, *named[1:]]
            if self._wrong == "log-probabilities of a part of the prompt":
                choices[0]["prompt_logprobs"].pop()
        return self._answer(prompt, choices)

    async def _generated(self, request: web.Request) -> web.Response:
        asked = await request.json()
        tokens = self._sample(asked["token_ids"], asked["sampling_params"], 0)["tokens"]
        if self._wrong == "generates other tokens":
            tokens = tokens[::-1]
        if self._wrong == "generates more than 4 MiB":
            return web.Response(text=" " * 5 * 2**20)
        return web.json_response({"choices": [{"token_ids": tokens}]})

    def _choice(self, number: int, sampled: Mapping[str, Any], *, chat: bool = False) -> dict[str, Any]:
        values = sampled["logprobs"]
        if self._wrong == "fewer log-probabilities than tokens":
            values = values[1:]
        logprobs = {"content": [{"logprob": value} for value in values]} if chat else {"token_logprobs": values}
        said = {"message": sampled["message"]} if chat else {"text": sampled["text"]}
        ids = {} if self._wrong == "no ids" else {"token_ids": sampled["tokens"]}
        changed = CHANGED.get(self._wrong, {})
        return {"index": number, "finish_reason": sampled["finish"], "logprobs": logprobs, **said, **ids, **changed}

    def _answer(self, prompt: Sequence[int], choices: list[dict[str, Any]]) -> web.Response:
        if self._wrong == "answers in another form":
            return web.json_response({"choices": []})
        if self._wrong == "answers nest":
            return web.Response(text=f'{{"error": {NESTED}')
        return web.json_response({"prompt_token_ids": list(prompt), "choices": choices})


def refused(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def served_format(folder: Path) -> ChatFormat:
    return ChatFormat(PretrainedTokenizer(folder))
