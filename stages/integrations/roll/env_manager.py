"""`FlowEnvManager`: a flow in the place of ROLL's environments, named by `custom_envs.<tag>.env_manager_cls`.

ROLL makes one for each environment, all of a worker in one process, and runs `run_rollout_loop` of each in a thread
(roll/pipeline/agentic/environment_worker.py:86-160). The first of each group puts the rollouts of all of them, so that
ROLL's queue gets a group at once; the others stay idle. The interface is that of `BaseEnvManager`
(roll/pipeline/agentic/env_manager/base_env_manager.py); ROLL requires no subclass of it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ...._pipeline.errors import InvalidPipeline
from ...._pipeline.runtime.flow import source
from ...rewards.reward_bridge import RewardBridge
from ..flow_thread.flow_run import Groups
from .atropos_flow import flow_function
from .data_proto import data_proto
from .group_queue import GroupQueue, Put, QueuePlace, held_episodes
from .job import RollJob
from .plain import plain
from .resources import amount_of, check_fit
from .rollouts import EnvNames, columns_of, metrics_of, names_of, oldest_version, reward_parts_of
from .router_policy import RouterPolicy, sampling_of
from .step_files import StepFiles
from .tag_flow import Bounds, Sampled, TagFlow

_flows: dict[str, TagFlow] = {}
"""By tag. ROLL makes the environments of a tag one by one, and passes them no object of their worker that is theirs."""

_flows_lock = threading.Lock()


class FlowEnvManager:
    """One of ROLL's environments, with rollouts from a flow of penstock.

    custom_envs:
      sums:
        env_type: penstock
        env_manager_cls: penstock.integrations.roll.FlowEnvManager
        flow: my_run:flow
        max_tokens_per_step: 512
        reward: {clip: [-1, 1]}
        resources: {num_cpus: 4}

    `reward` and `resources` may be absent. An environment of Atropos, `atropos: module:Class`, may be there in place of
    `flow`, with its interpreter, `python`.
    """

    def __init__(
        self,
        *,
        worker_config: Any,
        pipeline_config: Any,
        env_config: Mapping[str, Any],
        tokenizer: Any,
        generate_scheduler: Any,
        output_queue: Any,
        mode: str = "train",
        **_: Any,
    ) -> None:
        """Prepare; called by ROLL, with its configuration.

        Args:
            worker_config: `train_env_manager`.
            pipeline_config: the whole configuration.
            env_config: that of this environment: the tag's, and its numbers.
            tokenizer: that of the model.
            generate_scheduler: the router to ROLL's inference workers.
            output_queue: the `GroupQueueManager`.
            mode: `train` or `val`.

        Raises:
            InvalidPipeline: a flow does not support ROLL's configuration.
            InvalidConfig: `flow` names no function, or `atropos` is there too; `reward` does not fit; or the node has
                less than `resources`.
        """
        self._check(worker_config, pipeline_config, env_config, mode)
        self._worker_config = worker_config
        self._config = pipeline_config
        self._env = env_config
        self._pad_id: int = tokenizer.pad_token_id
        size = worker_config.group_size
        self._leads = env_config["env_id"] % size == 0
        """True if this is the first environment of its group."""
        self._env_ids = range(env_config["env_id"], env_config["env_id"] + size)
        self._queue = GroupQueue(output_queue, env_config["group_id"], self._env_ids)
        self._running = False
        with _flows_lock:
            tag = env_config["tag"]
            if tag not in _flows:
                _flows[tag] = self._make_flow(tag, tokenizer, generate_scheduler, output_queue)
            self.flow: TagFlow = _flows[tag]
            """The flow of the tag, shared by all its environments."""

    def _check(self, worker: Any, config: Any, env: Mapping[str, Any], mode: str) -> None:
        tag = env["tag"]
        if mode != "train" and config.eval_steps > 0:
            raise InvalidPipeline(
                f"ROLL: expected val_env_manager.tags without {tag!r}, whose flow trains: list a tag with "
                f"environments of ROLL there, or set eval_steps: 0"
            )
        if worker.group_size_redundancy:
            raise InvalidPipeline(
                f"ROLL: expected group_size_redundancy: 0 with a flow, which does not wait for an environment, got "
                f"{worker.group_size_redundancy}"
            )
        if worker.world_size > 1:
            raise InvalidPipeline(
                f"ROLL: expected one worker of environments, because a flow starts processes itself, got "
                f"{worker.world_size}: remove train_env_manager.max_env_num_per_worker"
            )

    def _make_flow(self, tag: str, tokenizer: Any, generate_scheduler: Any, output_queue: Any) -> TagFlow:
        worker, config, env = self._worker_config, self._config, self._env
        generation = worker.generating_args.to_dict()
        ratio = config.async_generation_ratio
        groups = worker.num_groups_partition[list(worker.tags).index(tag)]
        fixed = ratio == int(ratio) and config.rollout_batch_size > 0
        root = f"custom_envs.{tag}"
        resources = plain(env.get("resources", {}))
        policy = RouterPolicy(
            proxy=_LazyProxy(generate_scheduler, worker.llm_proxy, tokenizer),
            generation=generation,
            environments=groups * worker.group_size,
            ends=frozenset({tokenizer.eos_token_id, tokenizer.pad_token_id}),
            step=lambda: flow.step,
        )
        job = RollJob(
            tag=tag,
            policy=policy,
            model=worker.model_args.model_name_or_path,
            sampling=sampling_of(generation, env["max_tokens_per_step"]),
            max_length=config.sequence_length,
            group_size=worker.group_size,
            options=plain(env.get("config", {})),
            cpus=int(amount_of(resources, "CPU", f"{root}.resources")),
            gpus=int(amount_of(resources, "GPU", f"{root}.resources")),
        )
        check_fit(resources, _node(), f"{root}.resources")
        function = flow_function(env, root)
        reward = env.get("reward")
        bridge = None if reward is None else RewardBridge.from_config(plain(reward))

        def make_flow() -> Groups:
            made: Groups = source(function(job), max_lag=int(ratio))
            return made if bridge is None else made.then(bridge)

        per_step = groups * worker.max_traj_per_env * worker.group_size if fixed else None
        bounds = Bounds(worker.group_size, config.sequence_length, ratio, config.env_monitor.hung_timeout, per_step)
        files = StepFiles(Path(config.output_dir, "penstock", tag), config.save_steps)
        flow = TagFlow(tag, make_flow, bounds, files, lambda: held_episodes(output_queue))
        return flow

    # -- BaseEnvManager, called by ROLL's worker ---------------------------------------------------------------------

    def run_rollout_loop(self, data: Any) -> None:
        """Put groups of the flow into ROLL's queue, until ROLL shuts down.

        Raises:
            PenstockError: the error that ended the flow; it ends ROLL's step.
            FlowEnded: the flow has sent its last group, and ROLL wants more.
            FlowStalled: it has sent no group for ROLL's `env_monitor.hung_timeout`.
        """
        if not self._leads:
            return
        self._running = True
        seed = data.meta_info["seed"] + self._env["group_seed"]
        names = EnvNames(self._env["tag"], self._env["group_id"], seed)
        episode = self._queue.next_episode()
        sampled: Sampled | None = None
        while episode is not None and (sampled := sampled or self.flow.next(lambda: self._running)) is not None:
            answer = self._put(names, episode, sampled).answer
            if answer != "late":  # a group whose episode is gone can have the next one
                sampled = None
            if answer != "older":
                episode = self._queue.next_episode()

    def update_step(self, global_step: int, trace_meta: Any = None) -> None:  # noqa: ARG002 (of ROLL's interface)
        """Commit trained groups, and note ROLL's step. Called before ROLL asks for the batch of that step."""
        self.flow.begin_step(global_step)

    def stop(self) -> None:
        """Stop the flow, and everything that it started. Called by ROLL when training has ended."""
        self._running = False
        self.flow.stop()
        with _flows_lock:
            _flows.pop(self._env["tag"], None)

    def _put(self, names: EnvNames, episode: QueuePlace, sampled: Sampled) -> Put:
        group = sampled.group

        def send(step: int, metrics: dict[str, float]) -> Put:
            rollouts = [
                data_proto(
                    columns_of(row, self._config.sequence_length, self._pad_id),
                    names_of(row, names, episode.number, env_id),
                    {"metrics": metrics_of(row, names.tag, reward_parts_of(group, place))},
                )
                for place, (row, env_id) in enumerate(zip(group, self._env_ids, strict=True))
            ]
            rollouts[0].meta_info["metrics"] |= {f"env/{names.tag}/{name}": value for name, value in metrics.items()}
            return self._queue.put(episode, step, oldest_version(group), rollouts)

        return self.flow.put(episode, sampled, send)


def _node() -> Mapping[str, Any]:
    """Return the resources of this process's node, as Ray counts them."""
    ray = import_module("ray")
    here = ray.get_runtime_context().get_node_id()
    return next((node["Resources"] for node in ray.nodes() if node["NodeID"] == here), {})


class _LazyProxy:
    """ROLL's `llm_proxy`, made when the first completion is sampled: a flow with another policy needs none."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments
        self._made: Any = None
        self._lock = threading.Lock()

    def generate(self, **request: Any) -> Any:
        with self._lock:
            if self._made is None:
                create = import_module("roll.pipeline.agentic.llm_proxy").create_llm_proxy
                self._made = create(*self._arguments, env=None)
        return self._made.generate(**request)
