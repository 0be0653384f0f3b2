"""An inference worker of ROLL with a script in place of a model: it answers what environments of Atropos ask."""

# mypy: allow-subclassing-any, allow-untyped-decorators
# ROLL is no package of the ordinary tests.

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from tests.atropos_real.scripted_model import reply
from tests.roll_real.on_a_cpu import Dispatch, InferWorker, Worker, register
from transformers import AutoTokenizer


class ScriptedWorker(InferWorker):
    """Answers by `scripted_model`: every other answer is right."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def initialize(self, pipeline_config: Any) -> None:
        Worker.initialize(self, pipeline_config)
        self._tokenizer = AutoTokenizer.from_pretrained(self.worker_config.model_args.model_name_or_path)
        self._numbers = itertools.count()

    async def generate_request(self, payload: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0)
        text = reply(str(self._tokenizer.decode(payload["input_ids"])), next(self._numbers))
        tokens = [*self._tokenizer.encode(text), self._tokenizer.eos_token_id]
        logprobs = [-1.0] * len(tokens)
        return {"finish_reasons": ["stop"], "output_token_ids": [tokens], "output_logprobs": [logprobs]}

    async def abort_requests(self, request_ids: list[str]) -> None:
        """Finish them: an answer takes no time."""

    async def load_weights(self, weights: Any) -> None:
        """Answer as before."""
