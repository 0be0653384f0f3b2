"""verl's own trainers on a CPU: a tiny model in this process is in the place of the workers that need a GPU."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from tests.verl_real.framework import (
    PPOTrainerColocateAsync,
    PPOTrainerSync,
    base,
    checkpoint_engine,
    import_utils,
    llm_server,
    losses,
    ray,
    rollouts,
    tq,
    tu,
)
from tests.verl_real.framework import config as verl_config
from transformers import AutoModelForCausalLM

LEARNING_RATE = 3e-3


class Actor:
    """A worker group of verl's actor with one worker: `ActorRolloutRefWorker` on a CPU, in this process."""

    world_size = 1
    workers: tuple[Any, ...] = ()

    def __init__(self, config: Any) -> None:
        self._dispatch_info = {"actor": [0]}
        self.model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.config = verl_config.omega_conf_to_dataclass(config.actor)
        rollout = verl_config.omega_conf_to_dataclass(config.rollout)
        self.rollout = rollouts.get_rollout_class(rollout.name, rollout.mode)(rollout, config.model, device_mesh=None)
        self.sent: list[int] = []

    def compute_log_prob(self, batch: Any) -> Any:
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["input_ids"])
        with torch.no_grad():
            data["log_probs"], data["entropy"] = self._forward(data)
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=data.select("log_probs", "entropy"))
        return batch

    def update_actor(self, batch: Any) -> dict[str, Any]:
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
        tokens = int(sum(mask.sum() for mask in data["response_mask"].unbind()))
        tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens, global_batch_size=len(batch.keys))
        log_probs, _ = self._forward(data)
        loss, metrics = losses.ppo_loss(self.config, {"log_probs": log_probs}, data)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        values = {name.removeprefix("actor/"): float(metric.aggregate()) for name, metric in metrics.items()}
        return {"metrics": {"mfu": 0.0, **values}}

    def _forward(self, data: Any) -> tuple[Any, Any]:
        """Return the log-probability of the next token at each one, and the entropy, as verl's engines do."""
        found = []
        for tokens in data["input_ids"].unbind():
            logits = self.model(tokens[None]).logits[0].log_softmax(-1)
            following = logits.gather(-1, tokens.roll(-1)[:, None])[:, 0]
            found.append((following, -(logits.exp() * logits).sum(-1)))
        logprobs, entropies = (
            torch.nested.as_nested_tensor(list(each), layout=torch.jagged) for each in zip(*found, strict=True)
        )
        return logprobs, entropies

    def update_weights(self, global_steps: int, mode: str) -> list[Any]:
        assert mode == "naive"
        sending = self.rollout.update_weights(
            iter(self.model.state_dict().items()), peft_config=None, base_sync_done=True, global_steps=global_steps
        )
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, sending).result()
        self.sent.append(global_steps)
        return [ray.put(None)]

    def save_checkpoint(self, path: str, *_: Any, **__: Any) -> None:
        Path(path).mkdir(parents=True)
        torch.save(self.model.state_dict(), Path(path) / "model.pt")

    def load_checkpoint(self, local_path: str, **_: Any) -> None:
        self.model.load_state_dict(torch.load(Path(local_path) / "model.pt"))


class OnACpu:
    """Sets up what `PPOTrainer._setup` does, with one actor in this process and no reward workers."""

    def _setup(self: Any) -> None:
        self._init_tokenizer()
        self._init_dataloader()
        self._init_dump_executor()
        self.ref_in_actor = False
        self.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
        self.actor_rollout_wg = Actor(self.config.actor_rollout_ref)
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
        self.teacher_model_manager = self.distillation_config = None
        self.llm_server_manager = llm_server.LLMServerManager.create(
            config=self.config, worker_group=self.actor_rollout_wg
        )
        self.checkpoint_manager = checkpoint_engine.CheckpointEngineManager(
            config=verl_config.omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine),
            actor_wg=self.actor_rollout_wg,
            replicas=self.llm_server_manager.get_replicas(),
        )
        self._load_checkpoint()
        self.replay_buffer.poll_interval = 0.01


class SyncOnACpu(OnACpu, PPOTrainerSync):  # type: ignore[misc]  # of an untyped package
    pass


class AsyncOnACpu(OnACpu, PPOTrainerColocateAsync):  # type: ignore[misc]  # as above
    pass


class Logged:
    """Tracking of verl that keeps what it is given."""

    lines: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, *_: Any, **__: Any) -> None:
        type(self).lines = []

    def log(self, data: dict[str, Any], step: int) -> None:
        self.lines.append({"step": step, **data})


TRAINERS = {"sync": SyncOnACpu, "colocate_async": AsyncOnACpu}


def train(config: Any, trainer_class: Any = None, tracking: Any = Logged) -> tuple[Any, Any, list[dict[str, Any]]]:
    """Train as `TaskRunnerV1.run` does; return the trainer, the manager and what was logged."""
    base.Tracking = tracking
    trainer: Any = (trainer_class or TRAINERS[config.trainer.v1.trainer_mode])(config)
    trainer.init()
    manager = import_utils.load_class_from_fqn(config.actor_rollout_ref.rollout.agent.agent_loop_manager_class).create(
        config=config,
        llm_client=trainer.get_llm_client(),
        teacher_client=trainer.get_teacher_client(),
        reward_loop_worker_handles=trainer.get_reward_handles(),
    )
    try:
        trainer.fit(manager)
    finally:
        manager.close()
        trainer.actor_rollout_wg.rollout._publishing._transfer.close()
    return trainer, manager, tracking.lines


class Sender:
    """A worker group of verl's actor, as far as its checkpoint engine goes: `ActorRolloutRefWorker` in this process."""

    world_size = 1

    def __init__(self, config: Any, tensors: dict[str, torch.Tensor]) -> None:
        given = {"is_master": True, "bucket_size": 1 << 20, **config.engine_kwargs[config.backend]}
        self.engine = checkpoint_engine.CheckpointEngineRegistry.new(config.backend, **given)
        self.tensors = tensors

    def execute_checkpoint_engine(self, method: list[str], **arguments: list[Any]) -> list[Any]:
        of_worker = {name: values[0] for name, values in arguments.items()}
        return [ray.put(getattr(self.engine, method[0])(**of_worker))]

    def update_weights(self, global_steps: int, mode: str) -> list[Any]:
        assert mode == "penstock"
        sending = self.engine.send_weights(iter(self.tensors.items()), global_steps=global_steps)
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, sending).result()
        return [ray.put({})]
