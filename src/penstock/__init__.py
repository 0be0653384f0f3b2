"""penstock brings trajectories from reinforcement-learning environments to a trainer.

These are the names that every script uses; the others are in public modules by subject: `penstock.channels`,
`environments`, `policies`, `torch`, `losses`, `weights`, `teachers`, `training`, `rewards`, `records`, `servers`,
`accounting`, `errors`, `testing`, `integrations`. A name that is in no public module is internal, and may move.
"""

from __future__ import annotations

from ._pipeline.channels.channel import ReceiveChannel, SendChannel
from ._pipeline.graph.context import Context, Worker, current, drop
from ._pipeline.graph.each import each
from ._pipeline.graph.placement import here, joining, processes, ray
from ._pipeline.graph.report import Report
from ._pipeline.graph.schedule import Schedule
from ._pipeline.graph.stage import Sink, Source, Stage
from ._pipeline.graph.stage_info import StageInfo
from ._pipeline.runtime.flow import Flow, Pipeline, source
from ._pipeline.util.host_lock import host_lock
from ._schemas import GroupId, StopReason, TrainBatch, Trajectory, TrajectoryGroup, TrajectoryId
from ._stages.advantages.advantage_normalizer import AdvantageNormalizer
from ._stages.advantages.kl_reward import KLReward
from ._stages.advantages.truncation_mask import TruncationMask
from ._stages.batching.batcher import Batcher
from ._stages.rewards.reward_bridge import RewardBridge
from ._stages.sampling.group_assembler import GroupAssembler
from ._stages.sampling.source_env import SourceEnv
from ._stages.senders.journal import Journal
from ._stages.senders.source_channel import SourceChannel
from ._stages.sink.sink_trainer import SinkTrainer
from ._stages.teachers.teacher import Teacher

__version__ = "0.1.0"

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
    "Schedule",
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
    "TruncationMask",
    "Worker",
    "__version__",
    "current",
    "drop",
    "each",
    "here",
    "host_lock",
    "joining",
    "processes",
    "ray",
    "source",
]
