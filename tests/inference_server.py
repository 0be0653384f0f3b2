"""An inference server, small but real: `python inference_server.py <port> <vllm|sglang|openai> <folder of weights>`.

Its model is a table of logits: what follows a token depends on it alone. It streams OpenAI's completions as the server
of that name does, samples token by token until its client hangs up, and can be paused, put to sleep and given new
weights by the endpoints of that server. A prompt that begins with a token of `TROUBLE` meets it; `GET /tests` tells
what the server was asked since the last time, how many completions run, and how many were given up by their clients.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from base64 import b64encode
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import parse_qs

import numpy as np
import uvicorn
from numpy.typing import NDArray
from safetensors.numpy import load_file

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

VOCABULARY = 12
EOS = 0
TROUBLE = {
    "busy twice": 100,
    "always broken": 101,
    "too long": 102,
    "nonsense": 103,
    "cut off": 104,
    "error in the stream": 105,
    "never ends": 106,
    "silent": 107,
    "text alone": 108,
    "tokens as ids": 109,
    "no logprobs": 110,
    "too few logprobs": 111,
    "unknown reason": 112,
    "refusal in the stream": 113,
    "too much": 114,
    "no experts": 115,
    "experts beyond the model's": 116,
    "experts of a longer completion": 117,
    "experts that are no base64": 118,
}


def logprobs_of(logits: NDArray[np.float32], temperature: float) -> NDArray[np.float64]:
    """Return the log-probability of every token, at `temperature`."""
    scaled = logits.astype(np.float64) / temperature
    shifted = scaled - scaled.max()
    probabilities: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return probabilities


class Server:
    """The model and all running completions."""

    def __init__(self, kind: str, folder: str) -> None:
        self.kind = kind
        self.random = np.random.default_rng(0)
        self.asked: list[dict[str, Any]] = []
        self.calls: list[list[Any]] = []
        self.running = 0
        self.most_running = 0
        self.given_up = 0
        self.failures: Counter[int] = Counter()
        self.refused_paths: dict[str, int] = {}
        self.may_run = asyncio.Event()
        self.may_run.set()
        self.idle = asyncio.Event()
        self.idle.set()
        self.version: str | None = None
        self.asleep = False
        self.may_sleep = True
        self.gives_memory_back = True
        self.load(folder)

    def load(self, folder: str) -> None:
        if not (files := sorted(Path(folder).glob("*.safetensors"))):
            raise FileNotFoundError(f"No such file: {folder}/*.safetensors")
        self.table = load_file(files[0])["table"]

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = b""
        while (message := await receive()).get("more_body"):
            request += message["body"]
        request += message.get("body", b"")
        body = json.loads(request or b"{}")
        if scope["path"] == "/v1/completions":
            await self.complete(body, receive, send)
        elif scope["path"] == "/v1/models":
            await self.answer(send, {"data": [{"id": "bigram"}]})
        elif scope["path"] == "/tests":
            state = {name: getattr(self, name) for name in ("asked", "calls", "running", "most_running", "given_up")}
            await self.answer(send, state)
            self.asked, self.calls, self.most_running, self.given_up = [], [], self.running, 0
        elif scope["path"] == "/tests/refused":
            self.refused_paths = body
            await self.answer(send, {})
        elif scope["path"] == "/tests/traits":
            self.may_sleep, self.gives_memory_back = body["may_sleep"], body["gives_memory_back"]
            await self.answer(send, {})
        elif scope["path"] in self.refused_paths:
            await self.answer(send, {"detail": "not today"}, self.refused_paths[scope["path"]])
        else:
            query = {name: values[0] for name, values in parse_qs(scope["query_string"].decode()).items()}
            self.calls.append([scope["path"], query | body])
            await self.control(scope["path"], query | body, send)

    async def answer(self, send: Send, body: Any, status: int = 200, *headers: tuple[bytes, bytes]) -> None:
        encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
        started = {"type": "http.response.start", "status": status, "headers": list(headers)}
        await send(started)
        await send({"type": "http.response.body", "body": encoded})

    # -- requests of a trainer -----------------------------------------------------------------------------------------

    async def control(self, path: str, asked: dict[str, Any], send: Send) -> None:
        known = {"vllm": self.as_vllm, "sglang": self.as_sglang}.get(self.kind)
        answer = None if known is None else await known(path, asked)
        if answer is None:
            await self.answer(send, {"detail": "Not Found"}, 404)
        else:
            await self.answer(send, answer, 500 if "error" in answer else 200)

    async def as_vllm(self, path: str, asked: dict[str, Any]) -> dict[str, Any] | None:
        match path:
            case "/pause" if asked["mode"] == "wait":
                self.may_run.clear()
                await self.idle.wait()
            case "/resume":
                self.may_run.set()
            case "/sleep" | "/wake_up":
                self.asleep = path == "/sleep" and self.may_sleep
            case "/reset_prefix_cache":
                pass
            case "/collective_rpc" if asked["method"] == "reload_weights":
                try:
                    self.load(asked["kwargs"]["weights_path"])
                except FileNotFoundError as error:
                    return {"error": {"message": str(error)}}
            case "/update_weight_version":
                self.version = asked["new_version"]
            case _:
                return self.state_as_vllm().get(path)
        return {}

    def state_as_vllm(self) -> dict[str, dict[str, Any]]:
        return {
            "/version": {"version": "0.32.0"},
            "/is_sleeping": {"is_sleeping": self.asleep},
            "/server_info": {"vllm_config": {"model_config": {"enable_sleep_mode": self.gives_memory_back}}},
            "/weight_info": {"weight_version": self.version},
        }

    async def as_sglang(self, path: str, asked: dict[str, Any]) -> dict[str, Any] | None:
        match path:
            case "/pause_generation":
                self.may_run.clear()
            case "/continue_generation":
                self.may_run.set()
            case "/release_memory_occupation":
                self.table = np.zeros_like(self.table)
            case "/resume_memory_occupation":
                pass
            case "/update_weights_from_disk":
                try:
                    self.load(asked["model_path"])
                except FileNotFoundError as error:
                    return {"success": False, "message": str(error)}
                self.version = asked["weight_version"]
                return {"success": True}
            case "/model_info" | "/get_model_info":
                return {"model_path": "bigram", "weight_version": self.version or "default"}
            case _:
                return None
        return {}

    # -- completions ---------------------------------------------------------------------------------------------------

    async def complete(self, asked: dict[str, Any], receive: Receive, send: Send) -> None:
        self.asked.append(asked)
        trouble = next((name for name, token in TROUBLE.items() if token == asked["prompt"][0]), "")
        if await self.refused(trouble, send):
            return
        await self.may_run.wait()
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.idle.clear()
        answer = self.stream if asked.get("stream") else self.whole
        streaming = asyncio.ensure_future(answer(asked, trouble, send))
        hung_up = asyncio.ensure_future(receive())
        try:
            await asyncio.wait([streaming, hung_up], return_when=asyncio.FIRST_COMPLETED)
            self.given_up += not streaming.done()
        finally:
            streaming.cancel()
            hung_up.cancel()
            self.running -= 1
            if not self.running:
                self.idle.set()

    async def refused(self, trouble: str, send: Send) -> bool:
        self.failures[TROUBLE.get(trouble, 0)] += 1
        if trouble == "busy twice" and self.failures[TROUBLE[trouble]] % 3:
            await self.answer(send, {"message": "come again"}, 503, (b"retry-after", b"7"))
        elif trouble == "always broken":
            await self.answer(send, b"Internal Server Error", 500)
        elif trouble == "too long":
            await self.answer(send, {"error": {"message": "maximum context length is 8"}}, 400)
        else:
            return False
        return True

    async def stream(self, asked: dict[str, Any], trouble: str, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        if trouble == "silent":
            await asyncio.Event().wait()
        token = asked["prompt"][-1] % VOCABULARY
        for number in range(1, asked["max_tokens"] + 1):
            token, logprob = self.sample(token, asked["temperature"], ends=trouble != "never ends")
            reason = "stop" if token == EOS else "length" if number == asked["max_tokens"] else None
            await event(send, {"choices": [self.choice(token, logprob, reason, trouble)]})
            if trouble == "nonsense":
                await send({"type": "http.response.body", "body": b"data: {nonsense\n\n", "more_body": True})
            if trouble in {"error in the stream", "refusal in the stream"}:
                code = 500 if trouble.startswith("error") else 400
                await event(send, {"error": {"message": "lost my mind", "code": code}})
            if trouble == "cut off":
                raise ConnectionError
            if reason:
                break
            await asyncio.sleep(0.001 if trouble == "never ends" else 0)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def whole(self, asked: dict[str, Any], trouble: str, send: Send) -> None:
        """Answer without a stream, with the experts of each token that was read, as if all layers of three had some."""
        tokens, logprobs, reason = list[int](), list[float](), "length"
        while len(tokens) < asked["max_tokens"] and reason == "length":
            token, logprob = self.sample([*asked["prompt"], *tokens][-1] % VOCABULARY, asked["temperature"], ends=True)
            tokens, logprobs, reason = [*tokens, token], [*logprobs, logprob], "stop" if token == EOS else "length"
        choice: dict[str, Any] = {"index": 0, "text": "", "token_ids": tokens, "finish_reason": reason}
        choice["logprobs"] = {"tokens": [""] * len(tokens), "token_logprobs": logprobs}
        read = np.array([*asked["prompt"], *tokens][: None if "longer" in trouble else -1])
        experts = experts_of(read) + 8 * ("beyond" in trouble)
        extensions = {}
        if self.kind == "vllm" and trouble != "no experts":
            file = BytesIO()
            np.save(file, experts.astype(np.uint8))
            choice["routed_experts"] = b64encode(file.getvalue()).decode()
            if "base64" in trouble:
                choice["routed_experts"] = "~" + choice["routed_experts"]
        elif asked.get("return_routed_experts"):
            extensions["sglext"] = {"routed_experts": b64encode(experts.astype(np.int32).tobytes()).decode()}
        await self.answer(send, {"choices": [choice]} | extensions)

    def sample(self, token: int, temperature: float, *, ends: bool) -> tuple[int, float]:
        """Return the next token, and its log-probability as a server of this kind reports it."""
        own = logprobs_of(self.table[token], 1.0)
        tempered = logprobs_of(self.table[token], temperature) if temperature else own
        drawn = tempered + self.random.gumbel(size=VOCABULARY) * bool(temperature)
        chosen = int(drawn[0 if ends else 1 :].argmax()) + (not ends)
        return chosen, float((tempered if self.kind == "sglang" else own)[chosen])

    def choice(self, token: int, logprob: float, reason: str | None, trouble: str) -> dict[str, Any]:
        logprobs = {"tokens": [f"<{token}>"], "token_logprobs": [logprob]}
        choice: dict[str, Any] = {"index": 0, "text": f"<{token}>", "logprobs": logprobs, "finish_reason": reason}
        if self.kind != "openai" and trouble not in {"text alone", "tokens as ids"}:
            choice["token_ids"] = [token]
        if trouble == "tokens as ids":
            logprobs["tokens"] = [f"token_id:{token}"]
        if trouble == "no logprobs":
            choice["logprobs"] = None
        if trouble == "too few logprobs":
            logprobs["token_logprobs"] = []
        if trouble == "too much":
            choice |= {"token_ids": [token] * 9, "logprobs": None}
        if trouble == "unknown reason":
            choice["finish_reason"] = "boredom"
        return choice


def experts_of(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [T, 3, 2] the experts of `tokens` in each of three layers, two of eight."""
    first = (tokens[:, None] + np.arange(3)) % 8
    return np.stack([first, (first + 1) % 8], axis=-1)


async def event(send: Send, data: dict[str, Any]) -> None:
    await send({"type": "http.response.body", "body": b"data: %b\n\n" % json.dumps(data).encode(), "more_body": True})


async def main(port: int, kind: str, folder: str) -> None:
    config = uvicorn.Config(Server(kind, folder), log_level="warning", lifespan="off")
    listener = socket.socket(proto=socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY for no other
    listener.bind(("127.0.0.1", port))
    listener.listen()
    print(listener.getsockname()[1], flush=True)  # noqa: T201 (for the process that started it)
    await uvicorn.Server(config).serve([listener])


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
