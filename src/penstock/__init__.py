"""penstock: brings trajectories from reinforcement-learning environments to a trainer.

Every public name stands here or in `penstock.errors` and `penstock.testing`. A name is imported when it is first asked
for, so that `import penstock` costs nothing and torch is imported only by those who ask for what needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .pipeline.channels.carriers import connect, serve
    from .pipeline.channels.channel import ChannelStatistics, ReceiveChannel, SendChannel
    from .pipeline.channels.keys import Key
    from .pipeline.channels.lasting_sender import LastingSender, outlast
    from .pipeline.channels.memory import memory_channel
    from .pipeline.committed_prompts import CommittedPrompts
    from .pipeline.context import Context, Worker, current, drop
    from .pipeline.each import each
    from .pipeline.flow import Flow, Pipeline, source
    from .pipeline.ledger import Balance, Ledger
    from .pipeline.policy.weight_publisher import WeightPublisher
    from .pipeline.policy.weight_specs import Fused
    from .pipeline.policy.weight_subscriber import WeightSubscriber
    from .pipeline.processes.outside_server import OutsideServer, listens, responds
    from .pipeline.processes.placement import here, processes
    from .pipeline.stage import Sink, Source, Stage
    from .pipeline.stage_info import StageInfo
    from .pipeline.statistics import PipelineStatistics, Report
    from .pipeline.telemetry import JsonlSink, Metrics, get_logger
    from .schemas import (
        GroupId,
        Packer,
        StopReason,
        TokenizerIdentity,
        TrainBatch,
        Trajectory,
        TrajectoryGroup,
        TrajectoryId,
        check_tokenizers,
        identity_of,
    )
    from .stages.advantage_normalizer import AdvantageNormalizer
    from .stages.batcher import Batcher
    from .stages.engines.engine_publisher import EnginePublisher
    from .stages.engines.http_policy import HttpPolicy
    from .stages.engines.policies import Completion, Engine, NoOpEngine, NoOpPolicy, Policy, Tokenizer
    from .stages.engines.pretrained_tokenizer import PretrainedTokenizer
    from .stages.engines.torch_folder_subscriber import FolderSubscriber
    from .stages.engines.torch_policy import TorchPolicy
    from .stages.engines.torch_weight_folder import WeightFolder
    from .stages.environments import EnvironmentFailed, OutsideEnvironment, Rollout, ScoredDataset, StepEnvironment
    from .stages.group_assembler import GroupAssembler
    from .stages.journal import Journal
    from .stages.kl_reward import KLReward
    from .stages.losses import (
        CISPO,
        GSPO,
        KL,
        AdvantageWeighted,
        Distillation,
        Entropy,
        ImportanceWeight,
        PPOClip,
        SampledDistillation,
    )
    from .stages.reward_bridge import RewardBridge
    from .stages.rewards.reward_functions import Answer, RewardFunction
    from .stages.sink_trainer import SinkTrainer, Trainer, WeightedTrainer
    from .stages.source_channel import SourceChannel
    from .stages.source_env import SourceEnv
    from .stages.teacher import Teacher, TeacherEngine, TeacherPolicy
    from .stages.teachers.candidates import Candidates
    from .stages.teachers.http_teacher import HttpTeacher
    from .stages.teachers.torch_teacher import TorchTeacher
    from .stages.training.torch_ranked_trainer import RankedTrainer
    from .stages.training.torch_reference import TorchReference
    from .stages.training.torch_trainer import TorchTrainer

__all__ = [  # noqa: RUF022 (in the order of `sorted`: CISPO is no constant)
    "AdvantageNormalizer",
    "AdvantageWeighted",
    "Answer",
    "Balance",
    "Batcher",
    "CISPO",
    "Candidates",
    "ChannelStatistics",
    "CommittedPrompts",
    "Completion",
    "Context",
    "Distillation",
    "Engine",
    "EnginePublisher",
    "Entropy",
    "EnvironmentFailed",
    "Flow",
    "FolderSubscriber",
    "Fused",
    "GSPO",
    "GroupAssembler",
    "GroupId",
    "HttpPolicy",
    "HttpTeacher",
    "ImportanceWeight",
    "Journal",
    "JsonlSink",
    "KL",
    "KLReward",
    "Key",
    "LastingSender",
    "Ledger",
    "Metrics",
    "NoOpEngine",
    "NoOpPolicy",
    "OutsideEnvironment",
    "OutsideServer",
    "PPOClip",
    "Packer",
    "Pipeline",
    "PipelineStatistics",
    "Policy",
    "PretrainedTokenizer",
    "RankedTrainer",
    "ReceiveChannel",
    "Report",
    "RewardBridge",
    "RewardFunction",
    "Rollout",
    "SampledDistillation",
    "ScoredDataset",
    "SendChannel",
    "Sink",
    "SinkTrainer",
    "Source",
    "SourceChannel",
    "SourceEnv",
    "Stage",
    "StageInfo",
    "StepEnvironment",
    "StopReason",
    "Teacher",
    "TeacherEngine",
    "TeacherPolicy",
    "Tokenizer",
    "TokenizerIdentity",
    "TorchPolicy",
    "TorchReference",
    "TorchTeacher",
    "TorchTrainer",
    "TrainBatch",
    "Trainer",
    "Trajectory",
    "TrajectoryGroup",
    "TrajectoryId",
    "WeightFolder",
    "WeightPublisher",
    "WeightSubscriber",
    "WeightedTrainer",
    "Worker",
    "check_tokenizers",
    "connect",
    "current",
    "drop",
    "each",
    "get_logger",
    "here",
    "identity_of",
    "listens",
    "memory_channel",
    "outlast",
    "processes",
    "responds",
    "serve",
    "source",
]

_HOMES = {
    "pipeline.channels.carriers": ("connect", "serve"),
    "pipeline.channels.channel": ("ChannelStatistics", "ReceiveChannel", "SendChannel"),
    "pipeline.committed_prompts": ("CommittedPrompts",),
    "pipeline.context": ("Context", "Worker", "current", "drop"),
    "pipeline.each": ("each",),
    "pipeline.flow": ("Flow", "Pipeline", "source"),
    "pipeline.channels.keys": ("Key",),
    "pipeline.channels.lasting_sender": ("LastingSender", "outlast"),
    "pipeline.ledger": ("Balance", "Ledger"),
    "pipeline.channels.memory": ("memory_channel",),
    "pipeline.processes.outside_server": ("OutsideServer", "listens", "responds"),
    "pipeline.processes.placement": ("here", "processes"),
    "pipeline.stage": ("Sink", "Source", "Stage"),
    "pipeline.stage_info": ("StageInfo",),
    "pipeline.statistics": ("PipelineStatistics", "Report"),
    "pipeline.telemetry": ("JsonlSink", "Metrics", "get_logger"),
    "pipeline.policy.weight_publisher": ("WeightPublisher",),
    "pipeline.policy.weight_specs": ("Fused",),
    "pipeline.policy.weight_subscriber": ("WeightSubscriber",),
    "schemas": (
        "GroupId",
        "Packer",
        "StopReason",
        "TokenizerIdentity",
        "TrainBatch",
        "Trajectory",
        "TrajectoryGroup",
        "TrajectoryId",
        "check_tokenizers",
        "identity_of",
    ),
    "stages.advantage_normalizer": ("AdvantageNormalizer",),
    "stages.batcher": ("Batcher",),
    "stages.teachers.candidates": ("Candidates",),
    "stages.engines.engine_publisher": ("EnginePublisher",),
    "stages.environments": ("EnvironmentFailed", "OutsideEnvironment", "Rollout", "ScoredDataset", "StepEnvironment"),
    "stages.group_assembler": ("GroupAssembler",),
    "stages.engines.http_policy": ("HttpPolicy",),
    "stages.teachers.http_teacher": ("HttpTeacher",),
    "stages.journal": ("Journal",),
    "stages.kl_reward": ("KLReward",),
    "stages.losses": (
        "CISPO",
        "GSPO",
        "KL",
        "AdvantageWeighted",
        "Distillation",
        "Entropy",
        "ImportanceWeight",
        "PPOClip",
        "SampledDistillation",
    ),
    "stages.engines.policies": ("Completion", "Engine", "NoOpEngine", "NoOpPolicy", "Policy", "Tokenizer"),
    "stages.engines.pretrained_tokenizer": ("PretrainedTokenizer",),
    "stages.reward_bridge": ("RewardBridge",),
    "stages.rewards.reward_functions": ("Answer", "RewardFunction"),
    "stages.sink_trainer": ("SinkTrainer", "Trainer", "WeightedTrainer"),
    "stages.source_channel": ("SourceChannel",),
    "stages.source_env": ("SourceEnv",),
    "stages.teacher": ("Teacher", "TeacherEngine", "TeacherPolicy"),
    "stages.engines.torch_folder_subscriber": ("FolderSubscriber",),
    "stages.engines.torch_policy": ("TorchPolicy",),
    "stages.training.torch_ranked_trainer": ("RankedTrainer",),
    "stages.training.torch_reference": ("TorchReference",),
    "stages.teachers.torch_teacher": ("TorchTeacher",),
    "stages.training.torch_trainer": ("TorchTrainer",),
    "stages.engines.torch_weight_folder": ("WeightFolder",),
}
"""Which module each name comes from; the imports above say the same to type checkers, and a test compares the two."""

_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

_EXTRAS = {"torch": "torch", "safetensors": "torch", "xxhash": "torch", "aiohttp": "http", "tokenizers": "tokenizers"}
"""The extra that brings each optional dependency."""


def _imported(name: str) -> object:
    """Import a public name when it is first asked for (PEP 562).

    Raises:
        MissingExtra: what it needs is not installed; the message gives the command that installs it.
    """
    if name not in _HOME_OF:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    try:
        value: object = getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
    except ModuleNotFoundError as error:
        raise _translated(name, error) from error
    globals()[name] = value
    return value


def _translated(name: str, error: ModuleNotFoundError) -> ImportError:
    """What to tell somebody who asked for `name` and lacks a module for it."""
    from .pipeline.errors import MissingExtra  # noqa: PLC0415 (`import penstock` imports nothing)

    extra = _EXTRAS.get((error.name or "").partition(".")[0])
    if extra is None:
        return error
    return MissingExtra(f"penstock.{name} needs {error.name}, which is not installed: pip install 'penstock[{extra}]'")


if not TYPE_CHECKING:  # type checkers read the imports above; with this, they would believe in any name
    __getattr__ = _imported


def __dir__() -> list[str]:
    """Every public name, imported or not."""
    return sorted({*globals(), *__all__})
