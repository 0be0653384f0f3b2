"""`RouterPolicy`: ROLL's own inference workers as the policy of a flow, with the weights that ROLL keeps in them.

A completion is one call of ROLL's `llm_proxy` (roll/pipeline/agentic/llm_proxy/base_llm_proxy.py). It blocks, so it
runs in a thread. ROLL aborts calls in flight when it updates the weights; an aborted completion is sampled again from
its prompt (as in traj_env_manager.py:238-239): all tokens of a completion have one version, ROLL's step.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from ...._pipeline.errors import InvalidPipeline
from ...._pipeline.graph.context import Worker
from ...._schemas import StopReason
from ...contracts.policies import Completion, NoOpEngine
from ...contracts.sampling_params import SamplingParams
from .data_proto import data_proto


@dataclass(frozen=True, slots=True)
class RouterPolicy:
    """A policy that samples by ROLL's inference workers. It works in the process that ROLL gave it to."""

    proxy: Any
    """ROLL's `BaseLLMProxy`."""
    generation: Mapping[str, Any]
    """ROLL's `generating_args`. The sampling of each request replaces the fields that it knows."""
    ends: frozenset[int]
    """Tokens that end a completion."""
    environments: int
    """Requests at once. ROLL's router answers as many calls as there are environments, and one more; requests that wait
    while it is suspended are calls: with more of them it would never be resumed (rollout_scheduler.py:592)."""
    step: Callable[[], int]
    """Returns the step of ROLL with the weights that sample now."""

    def __reduce__(self) -> NoReturn:
        """Refuse to be sent to another process.

        Raises:
            InvalidPipeline: always.
        """
        raise InvalidPipeline(
            "expected the source of a flow with ROLL's policy on=here(), got it in other processes: ROLL's router can "
            "be called from its own worker only"
        )

    @asynccontextmanager
    async def open(self, worker: Worker) -> AsyncGenerator[RouterEngine]:  # noqa: ARG002 (of the protocol)
        """Yield an engine."""
        yield RouterEngine(self)


class RouterEngine(NoOpEngine):
    """Samples by ROLL's inference workers; ROLL updates, pauses and wakes them itself."""

    def __init__(self, policy: RouterPolicy) -> None:
        self._policy = policy
        self._threads = anyio.CapacityLimiter(policy.environments)
        self._sent = 0

    async def generate(self, prompts: Sequence[NDArray[np.int32]], sampling: SamplingParams) -> list[Completion]:
        """Return a completion for each prompt; see `Engine.generate`."""
        found: list[Completion | None] = [None] * len(prompts)

        async def fill(place: int) -> None:
            found[place] = await self._completion(prompts[place], sampling)

        async with anyio.create_task_group() as group:
            for place in range(len(prompts)):
                group.start_soon(fill, place)
        return [completion for completion in found if completion is not None]

    async def _completion(self, prompt: NDArray[np.int32], sampling: SamplingParams) -> Completion:
        self._sent += 1
        call = partial(_call, self._policy, prompt, sampling, self._sent)
        while True:
            answer = await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._threads)
            if answer is not None:
                return answer


def _call(policy: RouterPolicy, prompt: NDArray[np.int32], sampling: SamplingParams, number: int) -> Completion | None:
    """Return the completion of a prompt; None if ROLL has aborted it."""
    ids = prompt.astype(np.int64)
    columns = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(len(ids))}
    request = data_proto(columns, meta_info={"src_rank": number})
    config = {**policy.generation, **generation_of(sampling)}
    answer = policy.proxy.generate(messages=[], lm_input=request, generation_config=config)
    if answer is None:
        return None
    sampled = answer.batch["responses"][0].numpy().astype(np.int32)
    ends = np.isin(sampled, [*policy.ends, *sampling.stop_ids])
    ended = bool(ends.any())
    tokens = sampled[: ends.argmax() + 1] if ended else sampled  # ROLL's workers know two end tokens alone
    logprobs = None
    if "infer_logprobs" in answer.batch:
        behind = answer.batch["infer_logprobs"][0][-len(sampled) :].numpy().astype(np.float32)
        logprobs = behind[: len(tokens)]
    cut = not ended and len(tokens) >= sampling.max_completion_tokens
    return Completion(
        tokens=tokens,
        logprobs=logprobs,
        stop_reason=StopReason.LENGTH if cut else StopReason.STOP,
        policy_versions=np.full(len(tokens), policy.step(), np.int64),
    )


def generation_of(sampling: SamplingParams) -> dict[str, Any]:
    """Return the fields of ROLL's `generating_args` that `sampling` sets."""
    return {
        "max_new_tokens": sampling.max_completion_tokens,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1 if sampling.top_k is None else sampling.top_k,
        "repetition_penalty": sampling.repetition_penalty,
        **({"stop_strings": list(sampling.stop)} if sampling.stop else {}),
    }


def sampling_of(generation: Mapping[str, Any], max_tokens: int) -> SamplingParams:
    """Return ROLL's `generating_args` as parameters of sampling, bounded by the tag's `max_tokens_per_step`."""
    top_k = generation.get("top_k")
    return SamplingParams(
        max_completion_tokens=min(max_tokens, generation["max_new_tokens"]),
        temperature=generation.get("temperature") or 1.0,
        greedy=generation.get("temperature") == 0,
        top_p=generation.get("top_p") or 1.0,
        top_k=top_k if top_k and top_k > 0 else None,
        repetition_penalty=generation.get("repetition_penalty") or 1.0,
        stop=tuple(generation.get("stop_strings") or ()),
    )
