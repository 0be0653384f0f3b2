"""An inference engine for SkyRL's own generator: penstock's `TorchPolicy`, in the trainer's process or behind HTTP.

SkyRL's own servers are vLLM, on GPUs. `python -m tests.skyrl_real.own_engine FOLDER` serves the model in the folder at
the paths that SkyRL's `RemoteInferenceClient` calls, prints its port, and runs until it is killed.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web

from penstock import Worker
from penstock._stages.integrations.skyrl.sampling_params import sampling_of
from penstock.models import HFModel
from penstock.torch import TorchPolicy


class Engine:
    """Samples with the weights of `model`, which may be overwritten between two calls."""

    def __init__(self, folder: str) -> None:
        self.model = HFModel.from_pretrained(folder)
        self._stack = AsyncExitStack()
        self._engine: Any = None

    async def sample(self, prompt: list[int], params: Mapping[str, Any]) -> Any:
        """Return the completion of a prompt, with SkyRL's sampling parameters."""
        if self._engine is None:
            policy = TorchPolicy(lambda: self.model, eos_id=0)
            self._engine = await self._stack.enter_async_context(policy.open(Worker()))
        (found,) = await self._engine.generate([np.array(prompt, np.int32)], sampling_of(params))
        return found

    async def aclose(self) -> None:
        await self._stack.aclose()


class InProcess(Engine):
    """In the place of SkyRL's inference client."""

    def __init__(self, folder: str, tokenizer: Any) -> None:
        super().__init__(folder)
        self._tokenizer = tokenizer

    async def generate(self, input_batch: Mapping[str, Any], model: str | None = None) -> dict[str, Any]:  # noqa: ARG002
        (prompt,) = input_batch["prompt_token_ids"]
        found = await self.sample(prompt, input_batch["sampling_params"])
        return {
            "responses": [self._tokenizer.decode(found.tokens, skip_special_tokens=True)],
            "response_ids": [found.tokens.tolist()],
            "stop_reasons": [found.stop_reason.name.lower()],
            "response_logprobs": [found.logprobs.tolist()],
        }

    async def finish_session(self, session_id: str) -> None:
        """Do nothing."""


def application(engine: Engine) -> web.Application:
    """Return the server's paths."""

    async def generate(request: web.Request) -> web.Response:
        asked = await request.json()
        found = await engine.sample(asked["token_ids"], asked["sampling_params"])
        choice = {
            "token_ids": found.tokens.tolist(),
            "finish_reason": found.stop_reason.name.lower(),
            "logprobs": {"content": [{"logprob": each} for each in found.logprobs.tolist()]},
        }
        return web.json_response({"choices": [choice]})

    async def nothing(request: web.Request) -> web.Response:  # noqa: ARG001 (of the interface)
        return web.json_response({})

    async def load(request: web.Request) -> web.Response:
        path = (await request.json())["path"]
        engine.model.load_state_dict(torch.load(path))  # its own process: nothing else waits
        return web.json_response({})

    served = web.Application()
    paths = {"/inference/v1/generate": generate, "/load": load}
    paths |= dict.fromkeys(("/finish_session", "/pause", "/resume"), nothing)
    served.add_routes([web.post(path, handler) for path, handler in paths.items()])
    return served


async def serve(folder: Path) -> None:
    runner = web.AppRunner(application(Engine(str(folder))))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    sys.stdout.write(f"{runner.addresses[0][1]}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(serve(Path(sys.argv[1])))
