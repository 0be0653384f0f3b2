"""RunConfig: the configuration of a training run, from a model in a folder and a file of questions to checkpoints.

    model: {path: ./Qwen2.5-0.5B}
    data: {path: train.jsonl, prompt: question, evaluation: 200}
    reward:
      functions: [{function: reward:accuracy, kind: trl}]
    algorithm: {advantages: grpo, prompts: 32, steps: 200}

Knows no stage and imports no torch. `training_run` makes the stages.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec

from ..._pipeline.errors import InvalidConfig
from ..._pipeline.graph.placement import JoinedAt, RayActors
from ..._schemas.bounds import LARGEST
from ..._schemas.config import Config, counterpart_of_value, nearest
from ..advantages.estimator import WITHIN_GROUP
from ..advantages.formulas import Mode
from ..advantages.presets import Library
from ..advantages.units import Baseline
from ..contracts.rollouts import ROLLOUT_TIMEOUT_S
from ..contracts.routed_experts import RouterReplay
from ..contracts.sampling_params import SamplingParams
from ..models.lora_config import LoRA
from ..rewards.reward_shaping import RewardConfig
from ..tokenizers.chat_format import History, ObservationRole
from .other_names import OTHER_NAMES
from .supervised_config import SUPERVISED, refuse_unused

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=LARGEST)]
Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
Positive: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]
BelowOne: TypeAlias = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Unit: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1)]
Number: TypeAlias = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]

NotNegative: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]
FunctionName: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[\w.]+:[\w.]+$", description="module:function")]

BOUNDED = ("ppo", "gspo", "gmpo", "cispo", "dppo", "clip_cov")
"""Losses with bounds on the ratio, or on the change of the probability."""

COMPARING = (*WITHIN_GROUP, "gdpo", "reinforce++-baseline")
"""Advantages that compare the completions of a prompt."""

DISCOUNTED = ("reinforce++", "gae")
"""Advantages with a discount."""

LOSSES = (*BOUNDED, "kl_cov", "sapo", "vespo", "reinforce", SUPERVISED)

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
"""Trackers that have names of their own."""

Schedule: TypeAlias = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt"
]

BaseDtype: TypeAlias = Literal["float32", "bfloat16"]

ServerKind: TypeAlias = Literal["vllm", "sglang"]


class ModelConfig(Config, frozen=True):
    """The model that trains."""

    path: Text
    """Folder as transformers saves it, with the tokenizer beside the weights."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """bfloat16, float16: the model computes in it where that is safe, in samplers too; parameters, loss and optimizer
    stay float32. In float16 the loss is scaled."""
    base_dtype: BaseDtype | None = None
    """dtype of weights that do not train: the base of adapters, the reference, and the torch engine's; null for
    bfloat16 on a CUDA device in a run whose precision is bfloat16, and else float32."""
    head_backward_dtype: Literal["bfloat16"] | None = None
    """bfloat16: the gradients of the output layer are products of numbers in it, on a device with instructions for
    it; null for the dtype of the forward pass, which stays as it is."""
    attention: Text = "sdpa"
    """Kernel of the attention, by transformers' name."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, more computation."""
    compile: bool = False
    """Compile the model for training with torch.compile."""
    lora: LoRA | None = None
    """Adapters; null trains all parameters."""


class DataSetConfig(Config, frozen=True):
    """One of several sets of prompts."""

    path: Text
    weight: Positive = 1.0
    """Share of its prompts, relative to the other sets."""
    prompt: Text = "prompt"
    """Column of the prompt: text, or a list of messages."""
    name: str = ""
    """Its name in metrics; by default that of the file."""


class CurriculumConfig(Config, frozen=True):
    """The fields of `Curriculum`, but its file."""

    easy: Number = 1.0
    """Rows whose mean reward was at least so high when they were sampled last are left out."""
    hard: Number = 0.0
    """Rows whose mean reward was at most so high when they were sampled last are left out."""
    revisit: Count = 4
    """A row that is left out is sampled in one of so many epochs."""

    def __post_init__(self) -> None:
        """Check that some reward is neither too high nor too low."""
        if self.easy <= self.hard:
            raise InvalidConfig(f"easy: expected a number above hard, {self.hard:g}, got {self.easy:g}")


class DataConfig(Config, frozen=True):
    """The prompts. Every column of a row reaches the reward functions."""

    path: str = ""
    """JSONL or Parquet file, a folder of Parquet files or of `datasets`; left out where there are `sets`, or where the
    `environment` brings its prompts."""
    prompt: Text = "prompt"
    """Column of the prompt: text, or a list of messages; with the loss sft, of messages with their answers."""
    sets: tuple[DataSetConfig, ...] = ()
    """Several sets, mixed by weight."""
    chat: bool = True
    """Make the prompt with the chat template of the tokenizer; false passes text to the model as it is."""
    template: dict[str, Any] = msgspec.field(default_factory=dict)
    """Arguments of the chat template by name, such as enable_thinking."""
    system: str | None = ""
    """Text of the message of the system; empty or null for none."""
    evaluation: Natural | NotNegative = 0
    """Rows that are kept apart and evaluated before and after training: below 1 their share, from 1 on their number."""
    max_prompt_tokens: Count = 512
    """Longer prompts are not sampled, and counted as rejected; with the loss sft, longer conversations."""
    curriculum: CurriculumConfig | None = None
    """Leave rows out that the model always or never solves; null for all rows."""

    def __post_init__(self) -> None:
        """Check that there is at most one source of rows, and a chat for arguments of its template."""
        if self.path and self.sets:
            raise InvalidConfig(f"path: expected either it or sets, got path {self.path!r} and {len(self.sets)} sets")
        if self.template and not self.chat:
            raise InvalidConfig(f"template: expected no arguments without chat, got {sorted(self.template)}")


class VerifiersConfig(Config, frozen=True):
    """The fields of `VerifiersEnvironment`."""

    taskset: Text
    """Its id."""
    config: dict[str, Any] = msgspec.field(default_factory=dict)
    """Configuration of the environment, as in the section `env` of verifiers."""
    client: dict[str, Any] = msgspec.field(default_factory=dict)
    """Fields of its client."""


class TaskEnvironmentConfig(Config, frozen=True):
    """An environment that brings its prompts: `make` or `verifiers`."""

    make: FunctionName | None = None
    """Function or class that returns an environment of any kind, as `SourceEnv.make_env`; it brings its prompts."""
    verifiers: VerifiersConfig | None = None
    """A taskset of verifiers, which brings its tasks."""

    def __post_init__(self) -> None:
        """Check that there is one environment."""
        kinds = [name for name in ("make", "agent", "command", "verifiers", "mix") if hasattr(self, name)]
        given = [name for name in kinds if getattr(self, name)]
        if len(given) != 1:
            raise InvalidConfig(f"{kinds[0]}: expected one of {', '.join(kinds)}, got {', '.join(given) or 'none'}")

    @property
    def called(self) -> str:
        """Return the name of the function or the taskset."""
        return (self.make or "").partition(":")[2] if self.verifiers is None else self.verifiers.taskset


class EvaluatedEnvironmentConfig(TaskEnvironmentConfig, frozen=True):
    """An environment that is only evaluated: each of its prompts once; it has a length."""

    name: str = ""
    """Its name in metrics; by default that of the function or the taskset."""


class EnvironmentPart(TaskEnvironmentConfig, frozen=True):
    """An environment: one of `make`, `agent`, `command` and `verifiers`."""

    agent: FunctionName | None = None
    """Function of a row of `data` and of a client, as `AgentEnv.agent`."""
    command: tuple[Text, ...] = ()
    """Program of an agent and its arguments, as `AgentCommand.command`; it reads a row of `data`."""
    max_calls: Count | None = None
    """Bound on the calls of an agent in a rollout."""
    max_tokens: Count | None = None
    """Bound on the tokens that are sampled for a rollout of an agent."""

    def __post_init__(self) -> None:
        """Check that there is one environment, and the bounds of an agent alone."""
        super().__post_init__()
        if not self.is_agent and (self.max_calls or self.max_tokens):
            bound = "max_calls" if self.max_calls else "max_tokens"
            given = next(name for name in ("make", "verifiers", "mix") if getattr(self, name, None))
            raise InvalidConfig(f"{bound}: expected it beside agent or command, got {given}")

    @property
    def is_agent(self) -> bool:
        """Return whether it is an agent over the rows of `data`."""
        return self.agent is not None or bool(self.command)

    @property
    def called(self) -> str:
        """Return the name of the function, the program or the taskset."""
        if not self.is_agent:
            return super().called
        return Path(self.command[0]).name if self.agent is None else self.agent.partition(":")[2]


class MixedEnvironmentConfig(EnvironmentPart, frozen=True):
    """One of several environments."""

    weight: Positive = 1.0
    """Share of its prompts, relative to the other environments."""
    name: str = ""
    """Its name in metrics; by default that of the function, the program or the taskset."""

    @property
    def known_as(self) -> str:
        """Return its name in metrics."""
        return self.name or self.called


class EnvironmentConfig(EnvironmentPart, frozen=True):
    """The environment, in place of completions of the prompts of `data`; and what its conversations need."""

    mix: tuple[MixedEnvironmentConfig, ...] = ()
    """Several environments by weight."""
    max_length: Count | None = None
    """Tokens of a sequence, those of all its turns; by default those of a prompt and a completion."""
    timeout_s: Positive = ROLLOUT_TIMEOUT_S
    """Bound on the time of a rollout."""
    tools: FunctionName | None = None
    """Sequence of JSON schemas of tools, as `ChatFormat.tools`; requests of agents bring their own."""
    tool_calls: Text | None = None
    """Format of calls of tools: hermes, llama, mistral, json, or `module:function` for a `ToolCallParser`; null for the
    one that the template writes."""
    history: History = "keep"
    """See `ChatFormat.history`."""
    observation_role: ObservationRole = "user"
    """Role of the text of a step-wise environment."""

    @property
    def parts(self) -> tuple[EnvironmentPart, ...]:
        """Return each environment."""
        return self.mix or (self,)


class OptimizerConfig(Config, frozen=True):
    """AdamW and its schedule."""

    lr: Positive = 1e-6
    schedule: Schedule = "constant_with_warmup"
    """By transformers' name; those that need no further arguments."""
    warmup_steps: Natural = 0
    weight_decay: NotNegative = 0.0
    """Decay of matrices; norms and biases do not decay."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    max_grad_norm: Positive | None = 1.0
    micro_batch_tokens: Count | Literal["auto"] | None = "auto"
    """Tokens that the model computes at once, padding included: auto for 3,072 on a processor, and on a CUDA device
    16,384, or less where its memory is small; null for the whole batch."""


class ReferenceConfig(Config, frozen=True):
    """The reference of the KL term."""

    every: Count = 1
    """Steps between two updates of the reference."""
    share: Unit = 0.0
    """reference ← share · policy + (1 − share) · reference; 0 keeps the reference, 1 makes it the policy."""


class AdaptiveKLConfig(Config, frozen=True):
    """The controller of the weight of the KL term; see `AdaptiveKL`."""

    target: Positive
    """Divergence from the reference, in nats per token, that the weight is steered to."""
    horizon: Count = 10_000
    """Number of sequences that correct the relative error."""


class AdaptiveEntropyConfig(Config, frozen=True):
    """The controller of the weight of the entropy bonus; see `AdaptiveEntropy`."""

    target: Positive
    """Entropy, in nats per token, that is not to be fallen below."""
    delta: Positive = 0.005
    """Change of the weight in a step."""
    most: Positive = 1.0
    """Largest weight."""


class AlgorithmConfig(Config, frozen=True):
    """The algorithm: advantages, loss and batches."""

    advantages: Mode = "grpo"
    """Mode of the AdvantageNormalizer; with gdpo, the parts of the reward are its components. With gae a critic makes
    them, see `critic`."""
    gamma: Unit = 1.0
    """Discount of reinforce++ and gae from one token that trains to the next, and of baseline turn between turns."""
    gae_lambda: Unit = 1.0
    """λ of gae."""
    rewards: Literal["sequence", "token"] = "sequence"
    """`token` compares the rewards of turns, on the last token of each, in place of those of rollouts."""
    baseline: Baseline = "rollout"
    """What is compared with its like in the other rollouts of a prompt: each agent of a rollout with `agent`, each of
    its turns with `turn`."""
    preset: Library | None = None
    """Library whose advantages are computed where they differ."""
    loss: Text = "ppo"
    """ppo, gspo, gmpo, cispo, dppo, clip_cov, kl_cov, sapo, vespo or reinforce; sft to imitate the conversations of the
    data; or `module:function` for a loss of `penstock.losses`."""
    clip: tuple[NotNegative, NotNegative] | None = None
    """Bounds of the ratio below and above 1, with dppo of the change of the probability; null for those of the loss."""
    aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "prompt-mean"] = "token-mean"
    kl: NotNegative = 0.0
    """Weight of the KL term against the reference: the model before training; 0 for none."""
    adaptive_kl: AdaptiveKLConfig | None = None
    """Controller that starts from this weight; null keeps the weight."""
    reference: ReferenceConfig = ReferenceConfig()
    entropy: NotNegative = 0.0
    """Weight of an entropy bonus."""
    adaptive_entropy: AdaptiveEntropyConfig | None = None
    """Controller that starts from this weight, which may be 0; null keeps the weight."""
    group_size: Count = 8
    """Completions of a prompt; 1 with advantages that compare none of a prompt, as gae."""
    prompts: Count = 32
    """Prompts in a step; with sft, conversations."""
    steps: Count = 100
    """Optimizer steps of the run."""
    updates: Count = 1
    """Optimizer updates in a step, each on the whole batch."""
    router_replay: RouterReplay | None = None
    """Experts of a mixture in training: R3, those of the sampling engine; R2, those of the first pass over a batch, in
    all its updates; null for those of each pass."""
    router_aux_loss: NotNegative = 0.0
    """Weight of the load balancing loss of a mixture's routers; 0 for none."""
    max_lag: Natural = 1
    """Steps that the sampling weights may be behind; 0 makes a run repeatable."""
    drop_zero_variance: bool = False
    """Leave out prompts whose completions all have the same reward; others are sampled in their place."""
    mask_truncated: bool = False
    """Do not train completions that did not end by themselves; their rewards still count in those of the others."""
    optimizer: OptimizerConfig = OptimizerConfig()

    @property
    def is_supervised(self) -> bool:
        """Return whether the run imitates the conversations of its data, and samples nothing."""
        return self.loss == SUPERVISED

    @property
    def has_critic(self) -> bool:
        """Return whether a critic makes the advantages."""
        return self.advantages == "gae"

    @property
    def sequences(self) -> int:
        """Return the number of rollouts, or of conversations, in a step."""
        return self.prompts if self.is_supervised else self.prompts * self.group_size

    def __post_init__(self) -> None:
        """Check the values that depend on each other."""
        if self.adaptive_kl is not None and not self.kl:
            raise InvalidConfig("adaptive_kl: expected a positive kl beside it, the weight of the first step, got none")
        if self.reference.share and not self.kl:
            raise InvalidConfig("reference: expected a positive kl beside a share, got none: nothing else reads it")
        if self.loss not in LOSSES and ":" not in self.loss:
            known = f"{', '.join(LOSSES)} or module:function"
            advice = counterpart_of_value(RunConfig, "algorithm.loss", self.loss) or nearest(self.loss, LOSSES)
            raise InvalidConfig(f"loss: expected {known}, got {self.loss!r}{advice}")
        adapts = self.adaptive_kl is not None or self.adaptive_entropy is not None
        if ":" in self.loss and (self.entropy or adapts or self.aggregation != "token-mean"):
            raise InvalidConfig(
                f"loss: expected neither entropy, adaptive_entropy, adaptive_kl nor aggregation beside {self.loss}, "
                f"which returns the whole loss: set them in the function"
            )
        if self.adaptive_entropy is not None and self.entropy > self.adaptive_entropy.most:
            raise InvalidConfig(f"entropy: expected at most adaptive_entropy.most, got {self.entropy}")
        if self.clip is not None and self.loss not in BOUNDED:
            raise InvalidConfig(f"clip: expected with loss {', '.join(BOUNDED)}, got loss {self.loss}")
        self._check_advantages()

    def _check_advantages(self) -> None:
        """Check the keys that belong to some advantages alone."""
        mode = self.advantages
        if self.group_size == 1 and mode in COMPARING and not self.is_supervised:
            raise InvalidConfig(f"group_size: expected at least 2 with advantages {mode}, which compares them, got 1")
        if self.baseline != "rollout" and mode not in WITHIN_GROUP:
            raise InvalidConfig(f"baseline: expected rollout but with {', '.join(WITHIN_GROUP)}, got {mode}")
        if self.gamma != 1 and mode not in DISCOUNTED and self.baseline != "turn":
            discounted = f"{', '.join(DISCOUNTED)} or baseline turn"
            raise InvalidConfig(f"gamma: expected 1 but with {discounted}, got {self.gamma} with {mode}")
        if self.gae_lambda != 1 and mode != "gae":
            raise InvalidConfig(f"gae_lambda: expected 1 but with gae, got {self.gae_lambda} with {mode}")
        if self.has_critic and self.preset is not None:
            raise InvalidConfig(f"preset: expected none with gae, whose critic has one formula, got {self.preset}")
        if self.has_critic and self.drop_zero_variance:
            raise InvalidConfig(
                "drop_zero_variance: expected false with gae, which learns from completions of equal rewards, got true"
            )


class CriticConfig(Config, frozen=True):
    """The critic of advantages gae: a model that predicts the return of each token, and trains beside the policy."""

    model: str = ""
    """Folder of the model whose body it begins with; by default `model.path`. Its head begins with zeros."""
    learning_rate: Positive = 1e-5
    """Constant; the rest of AdamW, and the bound on the gradient, are those of `algorithm.optimizer`."""
    warmup_steps: Natural = 0
    """First steps in which the critic alone trains; the policy and its schedule stay as they are."""
    clip: Positive = 0.5
    """Bound on the change of a value in the updates of a step."""


class InferenceServerConfig(Config, frozen=True):
    """The inference server of an engine that is not `torch`."""

    url: Text
    """URL without a path."""
    model: str = ""
    """The model's name at the server; by default `model.path`."""
    weights: str = ""
    """Folder for new weights, readable by the server; by default in the folder of the run."""


class JoiningConfig(JoinedAt, frozen=True, kw_only=True):
    """Workers that join from other hosts; see `joining`."""

    weights: Text = "tcp://0.0.0.0:5556"
    """Address that they get the weights from."""


class ServersConfig(Config, frozen=True):
    """Inference servers that the run starts on this host, and ends with it: in place of the torch engine."""

    vllm: Count
    """Number of servers of vLLM."""
    tensor_parallel: Count = 1
    """GPUs of each; they are those that do not train."""
    python: Text | None = None
    """Interpreter that has vLLM; null for this one."""
    arguments: tuple[Text, ...] = ()
    """Further arguments of its command, `--gpu-memory-utilization=0.8`."""


class PlacementConfig(Config, frozen=True):
    """Processes and devices."""

    trainers: Count = 1
    """Processes that train one model together, each on a GPU of its own: ranks. `penstock run` starts them on this
    host, and torchrun on several."""
    samplers: Count = 1
    """Processes that sample."""
    servers: ServersConfig | None = None
    """Samples at servers that the run starts; null for the torch engine, or for `server`."""
    ray: RayActors | None = None
    """Samples in actors of Ray, whose nodes read the model and the data by the same paths; null for processes of this
    host."""
    joining: JoiningConfig | None = None
    """Samples in workers that join from other hosts; null for processes of this host."""
    restarts: Natural = 1
    """Times that each sampler is restarted after it died, within an hour, before the run ends, with a checkpoint; and
    that the run goes on from its last checkpoint after a rank or a server died. Workers that join are not restarted
    from here."""
    python: Text | None = None
    """Interpreter of the processes that sample, with the packages of an environment that exclude those of the trainer;
    null for this one. It has penstock, torch and transformers too."""
    device: str = ""
    """Device that trains, `cuda:0`; by default the first GPU, and the processor where there is none."""
    sampler_device: str = ""
    """Device of the torch engine; by default the GPUs that do not train, in turn, or else the device of training."""


class SamplesConfig(Config, frozen=True):
    """Trajectories of a step, and of an evaluation, that are shown and written as text: in `samples.jsonl`."""

    every: Count = 10
    """Steps between two choices; the first step has samples too."""
    count: Count = 5
    """Number of the best, and of the worst, by reward."""


class MetricsConfig(Config, frozen=True):
    """Metrics of the last step for other programs of the host."""

    prometheus: Annotated[int, msgspec.Meta(ge=1, le=65_535)] | None = None
    """Port of the loopback address for Prometheus; null for none."""


class EvaluationConfig(Config, frozen=True):
    """Evaluation before, during and after training: of the rows that `data.evaluation` keeps apart, and of `sets`."""

    every: Count = 20
    """Steps between two evaluations; a checkpoint is written at each."""
    samples: Count = 1
    """Completions of each prompt."""
    sampling: SamplingParams | None = None
    """Their parameters; by default greedy, or those of training for several."""
    sets: tuple[DataSetConfig, ...] = ()
    """Further sets, only evaluated."""
    environments: tuple[EvaluatedEnvironmentConfig, ...] = ()
    """Environments that bring their prompts; agents are evaluated over rows."""
    answer: FunctionName | None = None
    """Function from the text of a completion to its answer, for the majority; by default the text."""
    best: str = ""
    """Metric of the best checkpoint; by default mean@n of the first set."""


class ReplayConfig(Config, frozen=True):
    """The recorded run that a replay trains again; `penstock replay` writes it."""

    run: Text
    """Its folder."""
    last: Count | None = None
    """Step after which the replay ends; null for the last one of the recording."""


class RunConfig(Config, frozen=True):
    """A training run."""

    other_names: ClassVar[Mapping[str, str]] = OTHER_NAMES

    model: ModelConfig
    data: DataConfig
    reward: RewardConfig
    environment: EnvironmentConfig | None = None
    """null for one completion of each prompt of `data`."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    sampling: SamplingParams = SamplingParams()
    engine: Literal["torch"] | ServerKind = "torch"
    """torch samples in processes of this run; the others are inference servers, see `server`."""
    server: InferenceServerConfig | None = None
    placement: PlacementConfig = PlacementConfig()
    evaluation: EvaluationConfig | None = None
    """Evaluation every few steps too; null for one before the first and one after the last."""
    samples: SamplesConfig = SamplesConfig()
    trackers: tuple[Text, ...] = ()
    """tensorboard, wandb, trackio, mlflow, or a function `module:function` that returns a tracker."""
    metrics: MetricsConfig = MetricsConfig()
    folder: Text = "run"
    """Folder of checkpoints, metrics and summary. A run whose folder holds a checkpoint is continued."""
    checkpoint_every: Count = 50
    """Steps between checkpoints; one is also written at the end."""
    keep_checkpoints: Count = 2
    """Checkpoints that are kept."""
    skip_damaged: bool = False
    """Continue the run in the folder from its last checkpoint that is whole, where a later one is damaged."""
    record: bool = False
    """Keep each batch that is trained, for `penstock replay`."""
    replay: ReplayConfig | None = None
    """Train the batches of a recorded run, in place of sampling; null for a run with data of its own."""
    seed: Natural = 0
    """Seed of prompts, sampling and new parameters."""
    prepare: FunctionName | None = None
    """Function that is called with this configuration first, for example to make the model or the data."""
    allow_changes: bool = False
    """Continue the run in the folder also with other values of keys that `key_classes` refuses."""

    def __post_init__(self) -> None:
        """Check the values that depend on each other."""
        self._check_replay()
        if self.algorithm.is_supervised:
            self._check_supervised()
        self._check_engine()
        self._check_turns()
        self._check_rows()
        self._check_critic()
        evaluation = self.evaluation
        if evaluation is not None and not (self.data.evaluation or evaluation.sets or evaluation.environments):
            raise InvalidConfig(
                "evaluation: expected rows to evaluate, or environments, got neither: set sets, environments, or "
                "data.evaluation"
            )
        if self.algorithm.advantages == "gdpo" and (self.reward.clip or self.reward.combine != "add"):
            raise InvalidConfig(
                "algorithm.advantages: expected neither reward.clip nor combine: fallback with gdpo, which compares "
                "the parts of rewards"
            )
        self._check_trackers()
        if self.placement.ray is not None and self.placement.joining is not None:
            raise InvalidConfig("placement: expected either ray or joining, got both")
        if self.placement.trainers > 1 and self.placement.device not in {"", "cpu"}:
            raise InvalidConfig(
                f"placement.device: expected none, or cpu, beside trainers, each with a GPU of its own, got "
                f"{self.placement.device}"
            )
        if self.placement.python is not None and (self.placement.ray or self.placement.joining):
            raise InvalidConfig("placement: expected python without ray and joining, whose workers have their own")

    def _check_turns(self) -> None:
        """Check that there are turns where they are compared."""
        for key, usual in {"rewards": "sequence", "baseline": "rollout"}.items():
            if getattr(self.algorithm, key) != usual and self.environment is None:
                raise InvalidConfig(f"algorithm.{key}: expected an environment beside it, whose turns have rewards")

    def _check_replay(self) -> None:
        """Check that a replay has a loss of sampled completions, and no recording of its own."""
        if self.replay is None:
            return
        if self.algorithm.is_supervised:
            raise InvalidConfig(f"algorithm.loss: expected one of sampled completions in a replay, got {SUPERVISED}")
        if self.record:
            raise InvalidConfig("record: expected false in a replay, whose batches are kept by the run that it replays")

    def _check_trackers(self) -> None:
        """Check that each tracker is known, or a function."""
        for name in self.trackers:
            if name not in TRACKERS and ":" not in name:
                known = f"{', '.join(TRACKERS)} or module:function"
                raise InvalidConfig(f"trackers: expected {known}, got {name!r}{nearest(name, TRACKERS)}")

    def _check_critic(self) -> None:
        """Check that there is a critic where there are keys of one."""
        if self.critic != CriticConfig() and not self.algorithm.has_critic:
            raise InvalidConfig(
                f"critic: expected algorithm.advantages gae beside it, got {self.algorithm.advantages}, which has none"
            )

    def _check_supervised(self) -> None:
        """Check that a run that samples nothing has no key for it, and messages."""
        refuse_unused(self, RunConfig(model=self.model, data=DataConfig(path=self.model.path), reward=RewardConfig()))
        if self.algorithm.router_replay == "R3":
            raise InvalidConfig(
                f"algorithm.router_replay: expected R2 or null with algorithm.loss {SUPERVISED}, got R3"
            )
        if not self.data.chat:
            raise InvalidConfig(f"data.chat: expected true with algorithm.loss {SUPERVISED}, whose rows are messages")

    def _check_engine(self) -> None:
        """Check that there is one engine, that of servers which the run starts included."""
        servers = self.placement.servers
        if servers is not None:
            if self.server is not None or self.engine not in {"torch", "vllm"}:
                raise InvalidConfig(
                    "placement.servers: expected neither server nor another engine beside them, got one"
                )
            if self.placement.ray is not None or self.placement.joining is not None:
                raise InvalidConfig("placement.servers: expected samplers of this host, got ray or joining beside them")
            if self.placement.samplers < servers.vllm:
                raise InvalidConfig(
                    f"placement.samplers: expected at least {servers.vllm}, one for each server, got "
                    f"{self.placement.samplers}"
                )
            msgspec.structs.force_setattr(self, "engine", "vllm")
        elif (self.engine == "torch") != (self.server is None):
            given = "none" if self.server is None else self.server.url
            wanted = "no server" if self.engine == "torch" else "server: {url: http://host:port}"
            raise InvalidConfig(f"engine: expected {wanted} with engine {self.engine}, got {given}")
        if self.sampling.support and self.server is not None:
            raise InvalidConfig(
                f"sampling.keep_support: expected engine torch or placement.servers, which return the tokens that they "
                f"draw from, got a server at {self.server.url}: use one of these, or leave it out"
            )

    def _check_curriculum(self) -> None:
        """Check that the samplers make prompts of rows, on the host where their rewards are written, if it has one."""
        if self.data.curriculum is None:
            return
        if self.environment is not None:
            raise InvalidConfig("data.curriculum: expected none beside an environment, which chooses its own prompts")
        if self.placement.ray is not None or self.placement.joining is not None:
            raise InvalidConfig("data.curriculum: expected samplers of this host, got ray or joining beside it")

    def _check_rows(self) -> None:
        """Check that there are rows where they are read, and none where the environment brings its prompts."""
        self._check_curriculum()
        data, environment = self.data, self.environment
        has_agents = environment is not None and any(each.is_agent for each in environment.parts)
        if environment is not None and not has_agents:
            if data.path or data.sets or data.evaluation:
                raise InvalidConfig(
                    "data: expected neither path, sets nor evaluation beside an environment with prompts of its own"
                )
        elif not (data.path or data.sets):
            raise InvalidConfig("data.path: expected either it or sets, got path '' and 0 sets")
        if has_agents and (data.system or not data.chat):
            raise InvalidConfig("data: expected chat, and no system, beside an agent, which writes its own messages")

    @property
    def samples_nothing(self) -> bool:
        """Return whether the run has no sampler, reward and evaluation."""
        return self.algorithm.is_supervised or self.replay is not None

    @property
    def run_folder(self) -> Path:
        """Return the folder of the run."""
        return Path(self.folder)
