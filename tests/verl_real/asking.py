"""verl's trainer as far as it asks for groups and takes them: its own replay buffer, and its own functions."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
from tests.verl_real.framework import PPOTrainer, agent_loop, agent_loop_tq, tq, tu

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


def written_by_verl(group: TrajectoryGroup, uid: str, step: int) -> list[str]:
    """Have verl's own agent loop worker write the rollouts of a group; return their keys."""
    worker = object.__new__(agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class)
    worker.reward_loop_worker_handles, worker.distillation_enabled, worker.processor = None, False, None

    async def write() -> None:
        for session, row in enumerate(group):
            start, version = row.prompt_length, int(row.policy_versions[0])
            assert row.behavior_logprobs is not None
            output = agent_loop.AgentLoopOutput(
                prompt_ids=row.tokens[:start].tolist(),
                response_ids=row.tokens[start:].tolist(),
                response_mask=row.loss_mask[start:].astype(int).tolist(),
                response_logprobs=row.behavior_logprobs[start:].tolist(),
                reward_score=row.reward,
                num_turns=4,
                metrics=agent_loop.AgentLoopMetrics(),
                extra_fields={
                    "min_global_steps": version,
                    "max_global_steps": version,
                    "turn_scores": [],
                    "tool_rewards": [],
                },
            )
            await worker._agent_loop_postprocess(output, validate=False, uid=uid, session_id=session, global_steps=step)

    asyncio.run(write())
    return [f"{uid}_{session}_0" for session in range(len(group))]
