"""The stages and the trainer that a RunConfig stands for: the same objects that a script would make."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import torch
from msgspec import structs
from torch.nn.parallel import DistributedDataParallel

from ..._pipeline.accounting.telemetry import get_logger
from ..._pipeline.durability.recording import RECORDING
from ..._pipeline.errors import InvalidConfig, InvalidData, InvalidPipeline
from ..._pipeline.graph.context import current
from ..._pipeline.graph.placement import Remote, joining, processes, ray
from ..._pipeline.runtime.flow import Flow, Pipeline, source
from ..._pipeline.trackers.mlflow import MLflow
from ..._pipeline.trackers.prometheus import Prometheus
from ..._pipeline.trackers.tensorboard import TensorBoard
from ..._pipeline.trackers.tracker import Tracker
from ..._pipeline.trackers.trackio import Trackio
from ..._pipeline.trackers.wandb import WandB
from ..._pipeline.util.extras import extra
from ..._pipeline.util.hub import dataset_path, model_folder
from ..._pipeline.util.named_objects import call_object, import_object
from ..._pipeline.weights.weight_address import WeightAddress
from ..._schemas import TrajectoryGroup
from ..advantages.advantage_normalizer import GATHERING, AdvantageNormalizer
from ..advantages.truncation_mask import TruncationMask
from ..batching.batcher import Batcher
from ..contracts.causal_model import CausalModel
from ..contracts.policies import Policy
from ..contracts.prompts import Prompt
from ..contracts.rollouts import BRANCHES, ROLLOUT_TIMEOUT_S
from ..contracts.sampling_params import SamplingParams
from ..data.curriculum import Curriculum
from ..data.mixture import MixedPrompts, Mixture
from ..data.parquet_shards import sets_among
from ..data.prompt_dataset import LOOKED_AT, PromptDataset, PromptSet
from ..data.prompt_order import Split
from ..data.success_rates import SuccessRates
from ..engines.http_policy import HttpPolicy
from ..engines.torch_policy import TorchPolicy
from ..losses.adaptive_kl import AdaptiveKL
from ..losses.covariance import ClipCov, KLCov
from ..losses.entropy import AdaptiveEntropy, Entropy
from ..losses.kl import KL
from ..losses.policy import CISPO, DPPO, SAPO, AdvantageWeighted, PPOClip
from ..losses.products import check_backward_dtype
from ..losses.sequence_policy import GMPO, GSPO, VESPO
from ..losses.terms import Aggregated, Loss, LossTerm, Term
from ..models.hf_model import HFModel
from ..models.lora import insert
from ..models.torch_sharding import Trainable, shard
from ..rewards.reward_bridge import RewardBridge
from ..rewards.reward_shaping import RewardConfig
from ..rewards.reward_trial import try_functions
from ..sampling.demonstrations import Demonstrations
from ..sampling.environment_trial import try_environments
from ..sampling.environments import Environment
from ..sampling.evaluation import Evaluation
from ..sampling.samples import Samples
from ..sampling.source_env import SourceEnv
from ..sink.sink_trainer import SinkTrainer, Trainer, WeightSink
from ..tokenizers.end_tokens import check_end_of_turn
from ..tokenizers.pretrained_tokenizer import PretrainedTokenizer
from ..tokenizers.start_tokens import prompt_ids
from ..training.optimizers import ReferenceUpdates, adamw
from ..training.torch_ranked_trainer import RankedTrainer
from ..training.torch_trainer import TorchTrainer
from .dtypes import base_dtype, reference_dtype, sampled_dtype
from .environment_parts import chat_of, environment_of, evaluated_by, evaluated_environments
from .paths import with_paths
from .replay import recording_of
from .run_config import AlgorithmConfig, EvaluationConfig, RunConfig
from .torch_critic_parts import check_critic, critic_of, empty_value_model
from .torch_devices import CONCURRENCY, check_device, device_of, max_length_of, sampler_devices
from .torch_memory import check_memory
from .torch_mixtures import recorded_experts
from .torch_servers import check_servers

log = get_logger("penstock.models")

AUTOCAST = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

TRACKERS_BY_NAME: dict[str, Callable[[], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
    "mlflow": MLflow,
}

UNSTARTED = "http://127.0.0.1:8000"
"""Stands for the servers of a run that is only looked at."""

START_TIMEOUT_S = 600.0
"""Bound on the start of a sampling process. It imports torch and transformers: minutes from a cold network disk, or
beside many others."""


class RunParts:
    """The parts of a configured run. Making it reads the tokenizer, and no weights and no rows.

    Raises:
        InvalidConfig: the folder of the model has no tokenizer, a named object does not exist or is of another kind,
            bounds are out of range, or torch does not find a device.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        for key in ("device", "sampler_device"):
            check_device(key, getattr(config.placement, key))
        check_backward_dtype("config: model.head_backward_dtype", self._head_backward_dtype, device_of(config))
        self.folder = model_folder(config.model.path)
        """The folder of the model, downloaded first if its path is a name of the hub."""
        self._recorded = recorded_experts(config, self.folder)
        """Shape of the record of the experts that the engine chooses, if it is wanted."""
        self.tokenizer = PretrainedTokenizer(self.folder)
        """The one tokenizer of data, policy, reward and trainer."""
        self.chat = chat_of(config, self.tokenizer) if config.data.chat and config.replay is None else None
        if self.chat is not None:
            check_end_of_turn(self.tokenizer)
        self.rewards = RewardBridge(RewardConfig() if config.replay else config.reward)
        self.loss = loss_of(config.algorithm)
        self.trackers = _trackers(config)

    # -- data and sampling ---------------------------------------------------------------------------------------------

    @cached_property
    def environment(self) -> Callable[[], Environment]:
        """Return what makes the environment that trains.

        Raises:
            InvalidConfig: it names what does not exist, or is no function.
        """
        return environment_of(self.config, self._prompts)

    def _prompts(self) -> PromptDataset | Mixture:
        """Return the prompts that train."""
        datasets = self._datasets("train")
        weights = [each.weight for each in self.config.data.sets]
        return Mixture(datasets, weights) if weights else datasets[0]

    @property
    def demonstrations(self) -> Demonstrations:
        """Return the source of a run with the loss sft."""
        return Demonstrations(self._prompts(), max_length=max_length_of(self.config))

    def first_tokens(self) -> Sequence[int]:
        """Return the tokens of the first prompt, or conversation, that trains and can be read. Blocks.

        Raises:
            InvalidData: no such prompt exists.
            UnstableTemplate: see `Demonstrations.check`.
        """
        if self.config.algorithm.is_supervised:
            return [int(token) for token in self.demonstrations.check().tokens]
        content = _first_prompt(self._prompts()()).content
        return prompt_ids(self.tokenizer, content) if isinstance(content, str) else list(content)

    async def tried(self) -> list[str]:
        """Do one rollout of each environment with a made-up model, and return each as text.

        Raises:
            InvalidConfig: it fails, or cannot begin.
        """
        if self.config.samples_nothing:
            return []
        source, python = self.source(self.policy(None)), self.config.placement.python
        return await try_environments(source, python, START_TIMEOUT_S)

    @cached_property
    def kept_apart(self) -> dict[str, Callable[[], Environment]]:
        """Return what is evaluated of the rows that are kept apart, by the names of sets, and the environments."""
        if self.config.samples_nothing:
            return {}
        rows = self._datasets("evaluation") if self.config.data.evaluation else []
        found = [*evaluated_by(self.config, rows), *evaluated_environments(self.config)]
        if len(sets := dict(found)) < len(found):
            raise _same_names(found)
        return sets

    @cached_property
    def evaluation(self) -> Evaluation | None:
        """Return the evaluation before, during and after training; None without prompts for it.

        Raises:
            InvalidConfig: two sets have the same name, or `answer` does not exist.
        """
        found = [*self.kept_apart.items(), *evaluated_by(self.config, self._further_sets())]
        if not found:
            return None
        steps = self.config.algorithm.steps
        config = self.config.evaluation or EvaluationConfig(every=steps)
        if len(sets := dict(found)) < len(found):
            raise _same_names(found)
        return Evaluation(
            sets=sets,
            rewards=self.rewards,
            every=config.every,
            last=steps,
            samples=config.samples,
            sampling=config.sampling or (self.config.sampling if config.samples > 1 else self._greedy),
            answer=str.strip if config.answer is None else import_object(config.answer, "config: evaluation.answer"),
            best=config.best,
        )

    def _further_sets(self) -> list[PromptDataset]:
        """Return the sets that are only evaluated."""
        evaluation = None if self.config.samples_nothing else self.config.evaluation
        sets = () if evaluation is None else evaluation.sets
        return [self._dataset("train", each.path, each.prompt, each.name, evaluation=0) for each in sets]

    @property
    def _greedy(self) -> SamplingParams:
        sampling = self.config.sampling
        return SamplingParams(
            max_completion_tokens=sampling.max_completion_tokens,
            stop=sampling.stop,
            stop_ids=sampling.stop_ids,
            greedy=True,
        )

    def _datasets(self, split: Split) -> list[PromptDataset]:
        data = self.config.data
        if not data.sets:
            return [self._dataset(split, data.path, data.prompt, "")] if data.path else []
        return [
            self._dataset(split, each.path, each.prompt, each.name, place=place) for place, each in enumerate(data.sets)
        ]

    def _dataset(
        self, split: Split, path: str, prompt: str, name: str, *, evaluation: float | None = None, place: int = 0
    ) -> PromptDataset:
        data, trains = self.config.data, split == "train" and evaluation is None
        return PromptDataset(
            dataset_path(path, sets_among),
            prompt=prompt,
            split=split,
            evaluation=data.evaluation if evaluation is None else evaluation,
            seed=self.config.seed,
            shuffle=trains,
            chat=self.chat,
            system=data.system or "",
            max_prompt_tokens=data.max_prompt_tokens,
            curriculum=_curriculum(self.config, place) if trains else None,
            name=name,
        )

    def source(self, policy: Policy) -> SourceEnv:
        """Return the source of groups for training."""
        config, algorithm = self.config, self.config.algorithm
        per_sampler = -(-algorithm.prompts // config.placement.samplers) * algorithm.group_size
        return SourceEnv(
            self.environment,
            policy,
            self.tokenizer,
            chat=None if config.environment is None else self.chat,
            rollout_timeout_s=ROLLOUT_TIMEOUT_S if config.environment is None else config.environment.timeout_s,
            group_size=algorithm.group_size,
            max_length=max_length_of(self.config),
            sampling=config.sampling,
            concurrency=max(CONCURRENCY, per_sampler),
            turn_rewards=algorithm.rewards == "token",
            seed=config.seed,
            evaluation=self.evaluation,
        )

    def policy(self, weights: str | WeightAddress | None, urls: Sequence[str] = ()) -> Policy:
        """Return the policy: it samples with the weights published at `weights`, or updated by the trainer.

        Args:
            weights: where they are published, for the torch engine.
            urls: the servers that the run has started; before that none.
        """
        config, server = self.config, self.config.server
        if config.engine != "torch":
            return HttpPolicy(
                url=urls or (UNSTARTED if server is None else server.url),
                model=config.model.path if server is None else server.model or config.model.path,
                server=config.engine,
                concurrency=CONCURRENCY,
                tempered_logprobs=True if server is None else None,
                versions="server",
                routed_experts=self._recorded,
            )
        return TorchPolicy(
            partial(_sampled_model, config, self.folder, self._sampled_dtype),
            weights=weights,
            seed=config.seed,
            max_rows=CONCURRENCY,
            autocast=self._autocast,
            routed_experts=self._recorded is not None,
        )

    async def try_data(self) -> None:
        """Call every reward function once with the first readable row of each set; or look at what else is trained.

        Raises:
            InvalidConfig: a function has no value for two made-up completions.
            InvalidData: a set has no prompt, or no conversation that trains.
            MissingColumn: a set lacks a column that a function takes.
            NoRecording, FileDamaged: see `Recording.check`.
            UnstableTemplate: see `Demonstrations.check`.
        """
        if (recording := recording_of(self.config)) is not None:
            await anyio.to_thread.run_sync(recording.check)
            return
        if self.config.algorithm.is_supervised:
            await anyio.to_thread.run_sync(self.demonstrations.check)
            return
        for dataset in [*self._datasets("train"), *self._further_sets()]:
            prompt = await anyio.to_thread.run_sync(lambda rows: _first_prompt(rows()), dataset)
            await try_functions(self.rewards.components, prompt, self.tokenizer)

    # -- training ------------------------------------------------------------------------------------------------------

    @property
    def _autocast(self) -> torch.dtype | None:
        """Return the dtype of the model's computations, in sampling and in training."""
        return AUTOCAST[self.config.model.precision]

    @property
    def _head_backward_dtype(self) -> torch.dtype | None:
        name = self.config.model.head_backward_dtype
        return None if name is None else DTYPES[name]

    @property
    def _sampled_dtype(self) -> torch.dtype:
        return DTYPES[sampled_dtype(self.config, device_of(self.config).type)]

    @property
    def published_as(self) -> dict[str, str]:
        """Return the dtypes that samplers of the run receive as another one; adapters alone are float32 everywhere."""
        whole = self.config.model.lora is None or self.config.placement.servers is not None
        return {"float32": "bfloat16"} if whole and self._sampled_dtype == torch.bfloat16 else {}

    def model(self) -> HFModel:
        """Return the model with its weights, on the device that trains."""
        model, device = self.config.model, device_of(self.config)
        loaded = HFModel.from_pretrained(
            self.folder,
            attention=model.attention,
            gradient_checkpointing=model.gradient_checkpointing,
            lora=model.lora,
        )
        return _frozen(loaded, DTYPES[base_dtype(self.config, device.type)], device)

    def empty_model(self) -> HFModel:
        """Return the model without weights, to look at."""
        model = HFModel.empty(self.folder, attention=self.config.model.attention)
        if self.config.model.lora is not None:
            insert(model.module, self.config.model.lora)
        return model

    def _check_lengths(self, model: HFModel) -> None:
        """Compare the longest prompt and completion with the positions of `model`, without need of its weights.

        Raises:
            InvalidConfig: the model has no positions for so many tokens.
        """
        longest, keys, summed = self._longest
        if model.max_positions is not None and longest > model.max_positions:
            raise InvalidConfig(
                f"config: {keys}: expected at most {model.max_positions} tokens, the positions "
                f"of the model in {model.folder}, got {summed}: lower it"
            )
        if model.trained_positions is not None and longest > model.trained_positions:
            log.warning(
                "max_position_embeddings_exceeded",
                tokens=longest,
                trained=model.trained_positions,
                hint=f"{keys} = {summed}: answers beyond what the model was made for are poor",
            )

    @property
    def _longest(self) -> tuple[int, str, str]:
        """Return the most tokens that a sequence may have, the keys that say so, and their sum as text."""
        config, key = self.config, "sampling.max_completion_tokens"
        if config.environment is not None and config.environment.max_length is not None:
            length = config.environment.max_length
            return length, "environment.max_length", str(length)
        if config.algorithm.is_supervised:
            return max_length_of(config), "data.max_prompt_tokens", str(max_length_of(config))
        bounds = [(config.sampling.max_completion_tokens, key)]
        if config.evaluation is not None and config.evaluation.sampling is not None:
            bounds.append((config.evaluation.sampling.max_completion_tokens, f"evaluation.{key}"))
        (completion, key), prompt = max(bounds), config.data.max_prompt_tokens
        return (
            prompt + completion,
            f"data.max_prompt_tokens + {key}",
            f"{prompt} + {completion} = {prompt + completion}",
        )

    def reference(self, model: HFModel) -> CausalModel | None:
        """Return the reference of the KL term, with its weights; None if the loss has none."""
        if not self.config.algorithm.kl:
            return None
        if self.config.model.lora is not None:
            return model.reference()
        attention, device = self.config.model.attention, device_of(self.config)
        loaded = HFModel.from_pretrained(self.folder, attention=attention).requires_grad_(requires_grad=False)
        return _frozen(loaded, DTYPES[reference_dtype(self.config, device.type)], device)

    def trainer(self, model: Trainable, reference: CausalModel | None, values: Trainable | None = None) -> TorchTrainer:
        """Return the trainer of `model`, or of this rank, with the model of a critic if the run has one."""
        config, algorithm, optimizer = self.config, self.config.algorithm, self.config.algorithm.optimizer
        with extra("train", "a training run"):
            from transformers import get_scheduler  # noqa: PLC0415 (describing a run does not need it)
        share = algorithm.reference.share
        return TorchTrainer(
            model,
            optimizer=partial(adamw, lr=optimizer.lr, weight_decay=optimizer.weight_decay, betas=optimizer.betas),
            schedule=partial(
                get_scheduler,
                optimizer.schedule,
                num_warmup_steps=optimizer.warmup_steps,
                num_training_steps=max(1, algorithm.steps - config.critic.warmup_steps),
            ),
            loss=self.loss,
            max_grad_norm=optimizer.max_grad_norm,
            micro_batch_tokens=optimizer.micro_batch_tokens,
            temperature=config.sampling.temperature,
            updates=algorithm.updates,
            router_replay=algorithm.router_replay,
            router_aux_loss=algorithm.router_aux_loss,
            reference=reference,
            reference_updates=ReferenceUpdates(algorithm.reference.every, share)
            if reference is not None and share
            else None,
            autocast=self._autocast,
            head_backward_dtype=self._head_backward_dtype,
            compile=partial(torch.compile, dynamic=True) if config.model.compile else None,
            critic=critic_of(config, values),
        )

    def ranked_trainer(
        self, model: HFModel, reference: CausalModel | None, values: HFModel | None, *, sharded: bool
    ) -> RankedTrainer:
        """Return the trainer of this rank, which has a part of each model, or the whole, with gradients summed."""
        device = device_of(self.config)
        gathered_as = self._autocast if device.type == "cuda" else None

        def shared(each: HFModel) -> Trainable:
            if sharded:
                shard(each, each.module.get_decoder().layers, device.type, gathered_as)
                return each
            return DistributedDataParallel(each, device_ids=[device] if device.type == "cuda" else None)

        return RankedTrainer(self.trainer(shared(model), reference, None if values is None else shared(values)))

    # -- the pipeline --------------------------------------------------------------------------------------------------

    def _samplers(self, policy: Policy) -> Remote:
        placement = self.config.placement
        if placement.ray is not None:
            return ray(
                placement.samplers,
                restarts=placement.restarts,
                start_timeout_s=START_TIMEOUT_S,
                **structs.asdict(placement.ray),
            )
        if (on := placement.joining) is not None:
            weights = policy.weights if isinstance(policy, TorchPolicy) else None
            return joining(
                placement.samplers,
                url=on.url,
                key=on.key,
                weights=weights if isinstance(weights, WeightAddress) else None,
                digest=digest_of(self.config),
                absence_timeout_s=on.absence_timeout_s,
            )
        return processes(
            placement.samplers, restarts=placement.restarts, start_timeout_s=START_TIMEOUT_S, python=placement.python
        )

    def sketch(self) -> tuple[Pipeline, HFModel]:
        """Return the pipeline as it would run, and its model, without weights.

        Raises:
            InvalidConfig: a stage lacks something, or the model positions for the longest prompt and completion, or a
                device memory.
        """
        model = self.empty_model()
        self._check_lengths(model)
        if not self.config.samples_nothing:
            check_servers(self.config, model)
        values = empty_value_model(self.config)
        if values is not None and self.config.critic.model:
            check_critic(values, self.tokenizer)
            self._check_lengths(values)
        check_memory(self.config, model, values, lambda config: RunParts(config).empty_model())
        policy = None if self.config.samples_nothing else self.policy(None)
        reference = model if self.config.algorithm.kl else None
        pipeline = self.pipeline(policy, self.trainer(model, reference, values), None)
        try:
            pipeline.check()
        except InvalidPipeline as error:
            raise InvalidConfig(f"config: {error}") from None
        return pipeline, model

    def pipeline(self, policy: Policy | None, trainer: Trainer, publisher: WeightSink | None) -> Pipeline:
        """Return the pipeline of the run; without a policy, that of a run that samples nothing."""
        config, algorithm = self.config, self.config.algorithm
        batcher = Batcher(
            max_tokens=algorithm.sequences * max_length_of(config) * (1 if config.environment is None else BRANCHES),
            drop_zero_variance=algorithm.drop_zero_variance,
            sequences=algorithm.sequences,
        )
        sink = SinkTrainer(
            trainer,
            publisher,
            max_steps=algorithm.steps,
            checkpoint_every=config.checkpoint_every,
            keep_checkpoints=config.keep_checkpoints,
            samples=None
            if algorithm.is_supervised
            else Samples(every=config.samples.every, count=config.samples.count),
            record=config.run_folder / RECORDING if config.record else None,
        )
        if (recording := recording_of(config, self.tokenizer)) is not None:
            return source(recording).sink(sink, capacity=1)
        groups = source(self.demonstrations) if policy is None else self._compared(policy)
        return groups.then(batcher).sink(sink)

    def _compared(self, policy: Policy) -> Flow[TrajectoryGroup]:
        """Return the stages that sample groups, reward them and compute their advantages, unless a critic does."""
        algorithm = self.config.algorithm
        sampled = source(self.source(policy), on=self._samplers(policy), max_lag=algorithm.max_lag)
        rewarded = sampled.then(self.rewards)
        if self.config.data.curriculum is not None:
            rewarded = rewarded.then(SuccessRates(self._prompts()))
        if not algorithm.has_critic:
            rewarded = rewarded.then(_normalizer_of(algorithm, self.rewards.part_weights()))
        return rewarded.then(TruncationMask()) if algorithm.mask_truncated else rewarded


def _normalizer_of(algorithm: AlgorithmConfig, components: Mapping[str, float]) -> AdvantageNormalizer:
    """Return the stage that computes advantages; `components` are the weights of the parts of the reward."""
    try:
        return AdvantageNormalizer(
            algorithm.advantages,
            batch_groups=algorithm.prompts if algorithm.advantages in GATHERING else None,
            rewards=algorithm.rewards,
            baseline=algorithm.baseline,
            gamma=algorithm.gamma,
            preset=algorithm.preset,
            components=components if algorithm.advantages == "gdpo" else None,
        )
    except InvalidConfig as error:
        raise InvalidConfig(f"config: algorithm.advantages: {error}") from None


def _curriculum(config: RunConfig, place: int) -> Curriculum | None:
    """Return the curriculum of a set, whose file in the folder of the run has its place: a name may be no file's."""
    given = config.data.curriculum
    if given is None:
        return None
    path = Path(config.folder).absolute() / "curriculum" / f"{place}.rates"
    return Curriculum(path, given.easy, given.hard, given.revisit)


def _same_names(found: Sequence[tuple[str, object]]) -> InvalidConfig:
    names = ", ".join(name for name, _ in found)
    return InvalidConfig(f"config: expected sets of evaluation with names of their own, got {names}: set name")


def _first_prompt(prompts: PromptSet | MixedPrompts) -> Prompt:
    """Return the first prompt with a readable row.

    Raises:
        InvalidData: all of the first ones are unreadable.
    """
    for number in range(LOOKED_AT - 1):
        with suppress(InvalidData):
            return prompts.prompt(number)
    return prompts.prompt(LOOKED_AT - 1)


def _tracker(name: str) -> Tracker:
    """Return the tracker of that name, or that of the function `name`."""
    if ":" in name:
        made = _named_or_returned(name, "config: trackers", Tracker)
        if not isinstance(made, Tracker):
            raise InvalidConfig(
                f"config: trackers: expected {name} to return an object with start, log, samples and close, "
                f"got {made!r}"
            )
        return made
    return TRACKERS_BY_NAME[name]()


def _trackers(config: RunConfig) -> list[Tracker]:
    """Return the trackers of a run, that of `metrics` included."""
    port = config.metrics.prometheus
    return [_tracker(name) for name in config.trackers] + ([] if port is None else [Prometheus(port)])


def _named_or_returned(name: str, root: str, kind: Any) -> Any:
    """Return the object `name` if it is of `kind`, and otherwise the result of calling it."""
    named = import_object(name, root)
    return named if isinstance(named, kind) and not isinstance(named, type) else call_object(name, root)


def loss_of(algorithm: AlgorithmConfig) -> Loss:
    """Return the loss.

    Raises:
        InvalidConfig: it names a function that does not exist, or returns no loss, or bounds are out of range.
    """
    if ":" in algorithm.loss:
        loss: Loss = _named_or_returned(algorithm.loss, "config: algorithm.loss", LossTerm | Aggregated)
        if not isinstance(loss, LossTerm | Aggregated):
            raise InvalidConfig(
                f"config: expected algorithm.loss to return a loss of penstock.losses, got {type(loss).__name__}"
            )
        return loss
    try:
        term: LossTerm = _policy_term(algorithm)
    except ValueError as error:
        raise InvalidConfig(f"config: algorithm.clip: {error}") from None
    if algorithm.adaptive_kl is not None:
        term = term + AdaptiveKL(algorithm.kl, algorithm.adaptive_kl.target, algorithm.adaptive_kl.horizon)
    elif algorithm.kl:
        term = term + algorithm.kl * KL("k3")
    if (adaptive := algorithm.adaptive_entropy) is not None:
        term = term + AdaptiveEntropy(adaptive.target, algorithm.entropy, adaptive.delta, adaptive.most)
    elif algorithm.entropy:
        term = term - algorithm.entropy * Entropy()
    return term.aggregated(algorithm.aggregation)


_TERMS: dict[str, Callable[..., Term]] = {
    "ppo": PPOClip,
    "gspo": GSPO,
    "gmpo": GMPO,
    "cispo": CISPO,
    "dppo": DPPO,
    "clip_cov": ClipCov,
    "kl_cov": KLCov,
    "sapo": SAPO,
    "vespo": VESPO,
    "reinforce": AdvantageWeighted,
    "sft": AdvantageWeighted,  # of advantages that are 1
}


def _policy_term(algorithm: AlgorithmConfig) -> Term:
    term = _TERMS[algorithm.loss]
    if algorithm.clip is None:
        return term()
    low, high = algorithm.clip
    if algorithm.loss == "cispo":
        return CISPO(1 - low, 1 + high)
    return DPPO(low=low, high=high) if algorithm.loss == "dppo" else term(low, high)


def digest_of(config: RunConfig) -> str:
    """Return the digest of the values that all processes of a run share: the configuration without places and folder.

    Of a path the last part counts: each process has its own, by the folder of its file and by its home.
    """
    own = {"placement", "folder", "trackers", "metrics", "allow_changes", "skip_damaged"}
    agreed = {name: value for name, value in msgspec.to_builtins(config).items() if name not in own}
    values = with_paths(agreed, lambda text: Path(text).name)
    return hashlib.sha256(msgspec.json.encode(values, order="deterministic")).hexdigest()


def _sampled_model(config: RunConfig, folder: str, dtype: torch.dtype) -> HFModel:
    """Make the model that samples, in its process: without weights (they are published), or with adapters alone."""
    attention, lora = config.model.attention, config.model.lora
    devices = sampler_devices(config)
    device = (
        devices[current().worker.index % len(devices)]
        if devices
        else config.placement.sampler_device or device_of(config)
    )
    if lora is None and str(device) == "cpu":
        return HFModel.empty(folder, dtype=dtype, attention=attention)
    loaded = HFModel.from_pretrained(folder, attention=attention, lora=lora)
    return _frozen(loaded if lora is not None else loaded.requires_grad_(requires_grad=False), dtype, device)


def _frozen(model: HFModel, dtype: torch.dtype, device: torch.device | str) -> HFModel:
    """Move `model` to `device`, with the parameters that do not train in `dtype`.

    Its tables stay those of the model that publishes.
    """
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return model.to(device)
