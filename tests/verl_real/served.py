"""verl's own agent loop on a CPU: a server of penstock's engine is in the place of vLLM.

Named as `actor_rollout_ref.model.external_lib`. verl's agent loop manager, its workers, agent loop, client, load
balancer and reward workers are its own; the engine is that of a flow, and has the weights from the same publisher.
"""

# mypy: allow-subclassing-any
# verl is no package of the ordinary tests.

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.trl_real.letters import COMPLETION
from tests.verl_real.framework import SingleTurnAgentLoop, agent_loop, agent_loop_tq, ray, replicas, reward_loop
from tests.verl_real.training import SyncOnACpu

from penstock import Worker
from penstock._stages.integrations.verl.backend import NAME, PenstockReplica, register
from penstock.models import HFModel
from penstock.policies import PretrainedTokenizer, SamplingParams
from penstock.torch import TorchPolicy


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, **_: Any) -> float:  # noqa: ARG001 (of the interface)
    """Return the share of the letter e, as `tests.trl_real.letters.Prompts` does."""
    return solution_str.count("e") / COMPLETION


class Server:
    """Samples for verl's `LLMServerClient`; the engine opens when the first weights are published."""

    def __init__(self, model: str, url_file: str) -> None:
        torch.set_num_threads(1)
        self._model, self._url_file = Path(model), Path(url_file)
        self._engine: asyncio.Future[Any] | None = None

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> Any:
        if self._engine is None:
            self._engine = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._serve(self._engine))
        sampling = SamplingParams(temperature=sampling_params["temperature"], max_completion_tokens=COMPLETION)
        (found,) = await (await self._engine).generate([np.array(prompt_ids, np.int32)], sampling)
        return replicas.TokenOutput(
            token_ids=found.tokens.tolist(),
            log_probs=found.logprobs.tolist(),
            stop_reason="completed",
            extra_fields={"global_steps": int(found.policy_versions[0])},
        )

    async def _serve(self, opened: asyncio.Future[Any]) -> None:
        eos_id = PretrainedTokenizer(self._model).eos_id
        policy = TorchPolicy(partial(HFModel.empty, self._model), eos_id=eos_id, weights=self._url_file.read_text())
        async with policy.open(Worker()) as engine:
            opened.set_result(engine)
            await asyncio.Event().wait()


class ServedReplica(PenstockReplica):
    """Starts the server, where a replica of vLLM would start it."""

    def __init__(self, replica_rank: int, config: Any, model_config: Any, **_: Any) -> None:
        super().__init__(replica_rank)
        url_file = config.checkpoint_engine.engine_kwargs.penstock.url_file
        self._server_handle = ray.remote(num_cpus=0)(Server).remote(model_config.path, url_file)


@agent_loop.register("letters")
class Letters(SingleTurnAgentLoop):
    """verl's own agent loop; it takes the tokenizer for that of no known family, for it has no line feed."""

    def __init__(self, *given: Any, hf_model_type: str | None = None, **options: Any) -> None:  # noqa: ARG002
        super().__init__(*given, **options)


class OwnManager(agent_loop_tq.AgentLoopManagerTQ):
    """verl's own manager; it has nothing to close."""

    def close(self) -> None:
        """Do nothing."""


class OwnTrainer(SyncOnACpu):
    """verl's synchronous trainer with its own reward workers."""

    def _setup(self: Any) -> None:
        super()._setup()
        self.reward_loop_manager = reward_loop.RewardLoopManager(self.config)


def process_of(actor: Any) -> int:
    """Return the process of an actor of Ray."""
    pid: int = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    return pid


OWN_LOOP = [
    "actor_rollout_ref.model.external_lib=tests.verl_real.served",
    "actor_rollout_ref.rollout.agent.agent_loop_manager_class=tests.verl_real.served.OwnManager",
    "actor_rollout_ref.rollout.agent.default_agent_loop=letters",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "reward.num_workers=1",
    f"reward.custom_reward_function.path={__file__}",
]
"""Lines of the configuration; `trainer_class` is `OwnTrainer`."""

register()
replicas.RolloutReplicaRegistry.register(NAME, lambda: ServedReplica)
