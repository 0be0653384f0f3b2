"""verl's trainer as far as it asks for groups and takes them: its own replay buffer, and its own functions."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
from tests.verl_real.framework import PPOTrainer, agent_loop, agent_loop_tq, tq, tu
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from penstock import TrajectoryGroup
from penstock.integrations.verl import PenstockLoopManager

NUMBERS = itertools.count()


class Asking:
    """Asks as `PPOTrainer` does (trainer_base.py:1496), with a replay buffer that it has built as verl builds it."""

    def __init__(self, config: Any, manager: PenstockLoopManager) -> None:
        self.config = config
        self.agent_loop_manager = manager
        self.trainer_mode = config.trainer.v1.trainer_mode
        self.global_steps = 1
        self.refilled: list[int] = []
        self._resolve_filter_groups_metric = lambda: PPOTrainer._resolve_filter_groups_metric(self)
        self.replay_buffer: Any = PPOTrainer._build_replay_buffer(self)
        self.replay_buffer.poll_interval = 0.01

    def ask(self, count: int) -> list[str]:
        """Register prompts and dispatch them; return their ids."""
        uids = [f"prompt-{next(NUMBERS)}" for _ in range(count)]
        batch = tu.get_tensordict({"uid": np.array(uids, dtype=object), "index": np.arange(count)})
        tu.assign_non_tensor_data(batch, "global_steps", self.global_steps)
        tags = [{"is_prompt": True, "status": "pending", "global_steps": self.global_steps} for _ in uids]
        tq.kv_batch_put(keys=uids, partition_id="train", tags=tags)
        self.agent_loop_manager.generate_sequences(batch)
        return uids

    def _add_prompts_to_generate(self, count: int) -> int:
        self.refilled.append(count)
        return len(self.ask(count))

    def sample(self, count: int) -> tuple[Any, dict[str, Any]]:
        """Return a batch of groups."""
        batch, metrics = self.replay_buffer.sample(self.global_steps, "train", count)
        return batch, metrics

    def take(self, count: int) -> Any:
        """Ask for groups, and return a batch of as many."""
        self.ask(count)
        return self.sample(count)[0]

    def step_done(self, batch: Any) -> None:
        """Remove what was trained, as verl does at the end of a step, and begin the next one."""
        tq.kv_clear(keys=batch.keys, partition_id="train")
        self.global_steps += 1


def outputs_of(group: TrajectoryGroup) -> list[Any]:
    """Return the rollouts of a group as verl's agent loops return them."""
    outputs = []
    for row in group:
        start, version = row.prompt_length, int(row.policy_versions[0])
        assert row.behavior_logprobs is not None
        versions = {"min_global_steps": version, "max_global_steps": version}
        outputs.append(
            agent_loop.AgentLoopOutput(
                prompt_ids=row.tokens[:start].tolist(),
                response_ids=row.tokens[start:].tolist(),
                response_mask=row.loss_mask[start:].astype(int).tolist(),
                response_logprobs=row.behavior_logprobs[start:].tolist(),
                reward_score=row.reward,
                num_turns=4,
                metrics=agent_loop.AgentLoopMetrics(),
                extra_fields={**versions, "turn_scores": [], "tool_rewards": []},
            )
        )
    return outputs


def worker_of(worker_class: Any) -> Any:
    """Return an agent loop worker of verl that was not started, as far as it writes rollouts."""
    worker = object.__new__(worker_class)
    worker.reward_loop_worker_handles, worker.distillation_enabled, worker.processor = None, False, None
    worker.mm_processor_kwargs = {}
    return worker


def written_by_verl(group: TrajectoryGroup, uid: str, step: int) -> list[str]:
    """Have verl's own agent loop worker write the rollouts of a group; return their keys."""
    worker = worker_of(agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class)

    async def write() -> None:
        for session, output in enumerate(outputs_of(group)):
            await worker._agent_loop_postprocess(output, validate=False, uid=uid, session_id=session, global_steps=step)

    asyncio.run(write())
    return [f"{uid}_{session}_0" for session in range(len(group))]


def padded_by_verl(groups: list[TrajectoryGroup], prompt_length: int, response_length: int) -> Any:
    """Return the `DataProto` that verl's own agent loop worker makes of the rollouts of groups."""
    worker = worker_of(agent_loop.AgentLoopWorker)
    fast: Any = PreTrainedTokenizerFast
    worker.tokenizer = fast(tokenizer_object=Tokenizer(models.WordLevel({"#": 0})))
    worker.tokenizer.add_special_tokens({"pad_token": "#"})
    worker.rollout_config = SimpleNamespace(prompt_length=prompt_length, response_length=response_length)

    async def pad() -> list[Any]:
        outputs = [output for group in groups for output in outputs_of(group)]
        return [await worker._agent_loop_postprocess(output, validate=False, raw_prompt=[]) for output in outputs]

    return worker._postprocess(asyncio.run(pad()))
