"""`RollJob`: ROLL's configuration for the function that makes a flow for one of its tags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...contracts.policies import Policy
from ...contracts.sampling_params import SamplingParams
from ...tokenizers.pretrained_tokenizer import PretrainedTokenizer


@dataclass(frozen=True, slots=True)
class RollJob:
    """The values of ROLL's configuration that a flow needs, and ROLL's own inference workers.

    def flow(job: RollJob) -> Flow[TrajectoryGroup]:
        env = SourceEnv(make_env, job.policy, job.tokenizer, sampling=job.sampling, **job.pace)
        return source(env)
    """

    tag: str
    """The key in `custom_envs`."""
    policy: Policy
    """Samples by ROLL's inference workers, with weights that ROLL updates; for a source `on=here()`."""
    model: str
    """The folder of the model, ROLL's `pretrain`."""
    sampling: SamplingParams
    """ROLL's `generating_args`, with `max_tokens_per_step` of the tag."""
    max_length: int
    """ROLL's `sequence_length`: longer sequences are rejected."""
    group_size: int
    """Rollouts of each group; groups of another size are rejected."""
    cpus: int = 0
    """The tag's `resources`, `CPU` or `num_cpus`: for `on=processes(job.cpus)` of a flow with another policy."""
    gpus: int = 0
    """The same, `GPU` or `num_gpus`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The tag's `env_config`."""

    @property
    def tokenizer(self) -> PretrainedTokenizer:
        """Return the tokenizer of the model.

        Raises:
            InvalidConfig: `model` is no folder with a tokenizer.
        """
        return PretrainedTokenizer(self.model)

    @property
    def pace(self) -> dict[str, Any]:
        """Return the arguments of SourceEnv that make groups and sequences as large as ROLL takes them."""
        return {
            "group_size": self.group_size,
            "max_length": self.max_length,
        }
