"""The class of every key of a RunConfig: the reaction of a continued run to a value that differs from the folder's.

applied: the new value is used from the next step on, and replaces that of a checkpoint.
free: the new value is used; the learning and its data do not depend on it.
refused: an error, unless `allow_changes` is true. The weights, the trained trajectories and the metrics so far belong
to the earlier value: another model, other data or another objective is another run.

A file or folder may have another path: its content is compared, by the identities of the model and of the data.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

KeyClass: TypeAlias = Literal["applied", "free", "refused"]

APPLIED = """
model.precision
model.base_dtype
model.head_backward_dtype
model.lora.dropout
data.max_prompt_tokens
data.curriculum.easy
data.curriculum.hard
data.curriculum.revisit
environment.max_calls
environment.max_tokens
environment.mix[].max_calls
environment.mix[].max_tokens
environment.max_length
algorithm.clip
algorithm.kl
algorithm.adaptive_kl.target
algorithm.adaptive_kl.horizon
algorithm.reference.every
algorithm.entropy
algorithm.adaptive_entropy.target
algorithm.adaptive_entropy.delta
algorithm.adaptive_entropy.most
algorithm.group_size
algorithm.prompts
algorithm.steps
algorithm.updates
algorithm.router_replay
algorithm.router_aux_loss
algorithm.max_lag
algorithm.drop_zero_variance
algorithm.mask_truncated
algorithm.optimizer.lr
algorithm.optimizer.schedule
algorithm.optimizer.warmup_steps
algorithm.optimizer.weight_decay
algorithm.optimizer.betas
algorithm.optimizer.max_grad_norm
critic.learning_rate
critic.warmup_steps
critic.clip
sampling.max_completion_tokens
sampling.temperature
sampling.top_p
sampling.top_k
sampling.min_p
sampling.repetition_penalty
sampling.stop
sampling.stop_ids
sampling.greedy
sampling.keep_support
"""

FREE = """
model.path
model.attention
model.gradient_checkpointing
model.compile
data.path
data.sets[].path
data.sets[].name
reward.functions[].name
reward.functions[].concurrency
reward.functions[].reward_timeout_s
environment.timeout_s
algorithm.optimizer.micro_batch_tokens
critic.model
engine
server
server.url
server.model
server.weights
placement.trainers
placement.samplers
placement.python
placement.servers
placement.servers.vllm
placement.servers.tensor_parallel
placement.servers.python
placement.servers.arguments
placement.ray
placement.ray.address
placement.ray.num_cpus
placement.ray.num_gpus
placement.ray.resources
placement.ray.strategy
placement.ray.runtime_env
placement.ray.placement_timeout_s
placement.joining
placement.joining.url
placement.joining.weights
placement.joining.key
placement.joining.absence_timeout_s
placement.device
placement.sampler_device
placement.restarts
evaluation
evaluation.every
evaluation.sets
evaluation.sets[].path
evaluation.sets[].weight
evaluation.sets[].name
evaluation.environments
evaluation.environments[].make
evaluation.environments[].verifiers
evaluation.environments[].verifiers.taskset
evaluation.environments[].verifiers.config
evaluation.environments[].verifiers.client
evaluation.environments[].name
evaluation.best
samples.every
samples.count
trackers
metrics.prometheus
folder
checkpoint_every
keep_checkpoints
replay.run
replay.last
prepare
allow_changes
skip_damaged
"""

REFUSED = """
model.lora
model.lora.rank
model.lora.alpha
model.lora.targets
data.prompt
data.sets
data.sets[].weight
data.sets[].prompt
data.chat
data.template
data.system
data.evaluation
data.curriculum
reward.format_markers
reward.format_markers[].marker
reward.format_markers[].reward
reward.format_markers[].counted
reward.format_markers[].closing
reward.ordered
reward.length_bounty
reward.length_bounty.reward
reward.length_bounty.cap
reward.length_bounty.unit
reward.overlong
reward.overlong.length
reward.overlong.cache
reward.overlong.penalty
reward.combine
reward.right_from
reward.clip
reward.functions
reward.functions[].function
reward.functions[].kind
reward.functions[].weight
reward.functions[].on_failure
environment
environment.make
environment.agent
environment.command
environment.verifiers
environment.verifiers.taskset
environment.verifiers.config
environment.verifiers.client
environment.mix
environment.mix[].make
environment.mix[].agent
environment.mix[].command
environment.mix[].verifiers
environment.mix[].verifiers.taskset
environment.mix[].verifiers.config
environment.mix[].verifiers.client
environment.mix[].weight
environment.mix[].name
environment.tools
environment.tool_calls
environment.history
environment.observation_role
algorithm.advantages
algorithm.gamma
algorithm.gae_lambda
algorithm.rewards
algorithm.baseline
algorithm.preset
algorithm.loss
algorithm.aggregation
algorithm.adaptive_kl
algorithm.adaptive_entropy
algorithm.reference.share
sampling.seed
evaluation.samples
evaluation.sampling
evaluation.sampling.max_completion_tokens
evaluation.sampling.temperature
evaluation.sampling.top_p
evaluation.sampling.top_k
evaluation.sampling.min_p
evaluation.sampling.repetition_penalty
evaluation.sampling.stop
evaluation.sampling.stop_ids
evaluation.sampling.greedy
evaluation.sampling.keep_support
evaluation.sampling.seed
evaluation.sets[].prompt
evaluation.answer
record
replay
seed
"""

CLASSES: dict[str, KeyClass] = {
    **dict.fromkeys(APPLIED.split(), "applied"),
    **dict.fromkeys(FREE.split(), "free"),
    **dict.fromkeys(REFUSED.split(), "refused"),
}
"""The class of each key, and of each section that can be null or a list, for its presence; `[]` is any place."""

_PLACE = re.compile(r"\[\d+\]")


def is_of_a_mapping(key: str) -> bool:
    """Return whether `key` is one that a user chose, in a mapping such as `data.template`."""
    return _PLACE.sub("[]", key) not in CLASSES


def class_of(key: str) -> KeyClass:
    """Return the class of a key, or of the section that contains it: those of a mapping have no classes of their own.

    >>> class_of("reward.functions[2].weight"), class_of("placement.ray.runtime_env.pip")
    ('refused', 'free')
    """
    known = _PLACE.sub("[]", key)
    while known and known not in CLASSES:
        known = known.rpartition(".")[0]
    return CLASSES.get(known, "free")
