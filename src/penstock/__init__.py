"""penstock brings trajectories from reinforcement-learning environments to a trainer.

These are the names that every script uses; the rest stands in public modules by subject: `penstock.channels`,
`environments`, `policies`, `torch`, `losses`, `weights`, `teachers`, `training`, `rewards`, `records`, `servers`,
`accounting`, `errors`, `testing`, `integrations`. Whatever is in no public module is internal, and may move.
"""

from __future__ import annotations

from importlib.metadata import version

from .pipeline.channels.channel import ReceiveChannel, SendChannel
from .pipeline.context import Context, Worker, current, drop
from .pipeline.each import each
from .pipeline.flow import Flow, Pipeline, source
from .pipeline.processes.placement import here, processes
from .pipeline.stage import Sink, Source, Stage
from .pipeline.stage_info import StageInfo
from .pipeline.statistics import Report
from .schemas import GroupId, StopReason, TrainBatch, Trajectory, TrajectoryGroup, TrajectoryId
from .stages.advantage_normalizer import AdvantageNormalizer
from .stages.batcher import Batcher
from .stages.group_assembler import GroupAssembler
from .stages.journal import Journal
from .stages.kl_reward import KLReward
from .stages.reward_bridge import RewardBridge
from .stages.sink_trainer import SinkTrainer
from .stages.source_channel import SourceChannel
from .stages.source_env import SourceEnv
from .stages.teacher import Teacher

__version__ = version("penstock")

__all__ = [
    "AdvantageNormalizer",
    "Batcher",
    "Context",
    "Flow",
    "GroupAssembler",
    "GroupId",
    "Journal",
    "KLReward",
    "Pipeline",
    "ReceiveChannel",
    "Report",
    "RewardBridge",
    "SendChannel",
    "Sink",
    "SinkTrainer",
    "Source",
    "SourceChannel",
    "SourceEnv",
    "Stage",
    "StageInfo",
    "StopReason",
    "Teacher",
    "TrainBatch",
    "Trajectory",
    "TrajectoryGroup",
    "TrajectoryId",
    "Worker",
    "__version__",
    "current",
    "drop",
    "each",
    "here",
    "processes",
    "source",
]
