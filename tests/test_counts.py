"""Every count and every number of seconds that a public name takes is refused where it makes no sense, and converted.

The numbers are read from the signatures, so that one that is added is held to the rule; a public name that takes a
number and is missing from `MAKING` fails here too.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import anyio
import numpy as np
import pytest
import torch
from tests.public_surface import public_names
from tests.tiny_model import TinyModel

from penstock import SinkTrainer, TrainBatch, TrajectoryGroup
from penstock.errors import InvalidConfig, InvalidPipeline
from penstock.policies import NoOpPolicy
from penstock.servers import http_ready

PUBLIC = SimpleNamespace(**dict(public_names()))
"""Every public name as an attribute."""


class Idle:
    """A trainer, a teacher's policy and a tokenizer, for arguments that are never used."""

    tokenizer = None

    def step(self, batch: TrainBatch) -> dict[str, float]:
        raise AssertionError(batch)

    def open(self, worker: object) -> Any:
        raise AssertionError(worker)


async def judge(group: TrajectoryGroup) -> TrajectoryGroup:
    return group


def length(answer: object) -> float:
    raise AssertionError(answer)


async def _enter(url: str, **options: Any) -> None:
    with anyio.move_on_after(0):
        async with PUBLIC.connect_with_replay(url, **options):
            pass


def connect_with_replay(url: str, **options: Any) -> None:
    anyio.run(partial(_enter, url, **options))


def memory_channel(**capacities: Any) -> None:
    for end in PUBLIC.memory_channel[TrajectoryGroup](**capacities):
        end.close()


def environment() -> Any:
    """Make an environment; no test gets so far."""


def demonstrations(**options: Any) -> Any:
    chat = PUBLIC.ChatFormat(SimpleNamespace(chat_template="a template"))
    return PUBLIC.Demonstrations(PUBLIC.PromptDataset([{"prompt": "?"}], chat=chat), **options)


MAKING: dict[str, Callable[..., Any]] = {
    "AdvantageNormalizer": partial(PUBLIC.AdvantageNormalizer, "batch", batch_groups=4),
    "AgentEnv": partial(PUBLIC.AgentEnv, length, PUBLIC.PromptDataset([{"prompt": "?"}])),
    "AtroposClient": partial(PUBLIC.AtroposClient, batch_size=4, max_token_len=64, num_steps=100),
    "AtroposEnvironment": partial(PUBLIC.AtroposEnvironment, "games:Guess"),
    "AtroposGateway": partial(PUBLIC.AtroposGateway, batch_size=4, max_token_len=64),
    "AtroposTrainers": PUBLIC.AtroposTrainers,
    "Backoff": PUBLIC.Backoff,
    "Batcher": partial(PUBLIC.Batcher, max_tokens=64),
    "Critic": partial(PUBLIC.Critic, model=TinyModel(), optimizer=partial(torch.optim.SGD, lr=0.1)),
    "ServerConfig": PUBLIC.ServerConfig,
    "Evaluation": partial(PUBLIC.Evaluation, {"sums": environment}, sampling=PUBLIC.SamplingParams()),
    "GroupAssembler": partial(PUBLIC.GroupAssembler, group_size=4, stragglers="drop", deadline_s=4.0),
    "HttpPolicy": partial(PUBLIC.HttpPolicy, url="http://127.0.0.1:1", model="m"),
    "Judge": partial(PUBLIC.Judge, "http://127.0.0.1:1", "m", "{completion}"),
    "Journal": partial(PUBLIC.Journal, "journal"),
    "JsonlMetrics": partial(PUBLIC.JsonlMetrics, "metrics.jsonl"),
    "MathVerify": PUBLIC.MathVerify,
    "ReplayingSender": partial(PUBLIC.ReplayingSender, capacity=4, capacity_bytes=4, reconnect_timeout_s=4.0),
    "Limits": PUBLIC.Limits,
    "LoRA": PUBLIC.LoRA,
    "OutsideServer": partial(PUBLIC.OutsideServer, command=["true"], ready=http_ready("http://127.0.0.1:1")),
    "OpenEnvEnvironment": partial(PUBLIC.OpenEnvEnvironment, "http://127.0.0.1:1", "text", "text"),
    "Packer": PUBLIC.Packer,
    "Prometheus": PUBLIC.Prometheus,
    "PromptDataset": partial(PUBLIC.PromptDataset, [{"prompt": "?"}]),
    "Recording": partial(PUBLIC.Recording, "recording"),
    "ReferenceUpdates": PUBLIC.ReferenceUpdates,
    "RewardFunction": partial(PUBLIC.RewardFunction, length),
    "RewardModel": partial(PUBLIC.RewardModel, "folder"),
    "RoutedExperts": partial(PUBLIC.RoutedExperts, layers=4, chosen=4, experts=4),
    "Samples": PUBLIC.Samples,
    "SamplingParams": PUBLIC.SamplingParams,
    "SinkTrainer": partial(PUBLIC.SinkTrainer, Idle()),
    "SourceChannel": PUBLIC.SourceChannel,
    "source": partial(PUBLIC.source, PUBLIC.SourceEnv(environment, NoOpPolicy())),
    "SourceEnv": partial(PUBLIC.SourceEnv, environment, NoOpPolicy()),
    "PrimeRLSink": partial(PUBLIC.PrimeRLSink, "output", ranks=1, seq_len=1),
    "PrimeRLTrainer": partial(PUBLIC.PrimeRLTrainer, "output", ranks=1, seq_len=1),
    "DataProtoBatches": partial(PUBLIC.DataProtoBatches, environment, sequences=4, prompt_length=4, response_length=4),
    "Demonstrations": demonstrations,
    "TRLWorker": partial(PUBLIC.TRLWorker, environment),
    "Teacher": partial(PUBLIC.Teacher, Idle(), top_k=4),
    "TorchPolicy": partial(PUBLIC.TorchPolicy, TinyModel, eos_id=0),
    "TorchReference": partial(PUBLIC.TorchReference, TinyModel),
    "TorchTeacher": partial(PUBLIC.TorchTeacher, TinyModel, None),
    "TorchTrainer": partial(PUBLIC.TorchTrainer, TinyModel(), optimizer=partial(torch.optim.SGD, lr=0.1)),
    "WeightPublisher": partial(PUBLIC.WeightPublisher, {"bias": torch.zeros(1)}),
    "host_lock": partial(PUBLIC.host_lock, "a purpose"),
    "connect": partial(PUBLIC.connect, "shm:///nowhere", TrajectoryGroup),
    "each": partial(PUBLIC.each, judge),
    "tcp_ready": PUBLIC.tcp_ready,
    "memory_channel": memory_channel,
    "connect_with_replay": partial(connect_with_replay, "shm:///nowhere"),
    "processes": partial(PUBLIC.processes, count=4),
    "ray": partial(PUBLIC.ray, workers=4),
    "joining": partial(PUBLIC.joining, expected=4),
    "serve": partial(PUBLIC.serve, "shm://", TrajectoryGroup),
    "trl_reward": partial(PUBLIC.trl_reward, length),
    "verl_reward": partial(PUBLIC.verl_reward, length),
}
"""Make each with all required arguments but the number under test."""

RESULTS = {
    "Summary",
    "Action",
    "Balance",
    "BlockingAgentClient",
    "Call",
    "ChannelKey",
    "ChannelStatistics",
    "CommandResult",
    "EdgeStatistics",
    "KVCache",
    "Outcome",
    "PaddedBatch",
    "ParsedTurn",
}
RESULTS |= {
    "PipelineStatistics",
    "Prompt",
    "RemoteReceiver",
    "RemoteSender",
    "Report",
    "ResumePoint",
    "RewardComponent",
    "RewardInput",
    "RollJob",
    "Branch",
    "RolloutResult",
}
RESULTS |= {
    "RunInfo",
    "RunningServer",
    "Sample",
    "Scored",
    "StageInfo",
    "StageStatistics",
    "TokenizerIdentity",
    "TrainBatch",
    "Trajectory",
}
RESULTS |= {"TrajectoryId", "WeightAddress", "Worker", "WorkerStatistics"}
"""Values that are handed over and bound nothing, and ends that penstock makes."""

BUILDERS = {"batch", "drive_source", "group", "trajectory", "write_checkpoint"}
"""Of penstock's own tests and trainers; their numbers end in records and names, which have rules of their own."""

RATIOS = {
    *(
        "AdaptiveEntropy",
        "AdaptiveKL",
        "Aggregated",
        "CISPO",
        "Curriculum",
        "DPPO",
        "Distillation",
        "GMPO",
        "GSPO",
        "GeometricMask",
        "ImportanceWeight",
        "KLReward",
    ),
    *("ClipCov", "KLCov", "OffPolicyMask", "PPOClip", "ProductMask", "SAPO", "TokenMask", "TopEntropyMask", "VESPO"),
    *("WorstTokenMask", "adamw"),
}
"""Names whose numbers have other bounds, tested elsewhere; a loss makes `Aggregated`, and torch checks `adamw`."""

NO_COUNTS = {"seed", "eos_id", "clip", "gamma", "gae_lambda", "on_failure", "weight"}
NO_COUNTS |= {"dropout", "share", "top_p", "min_p", "router_aux_loss"}
"""Arguments that are neither counts nor seconds."""

LEAST = {"Journal.capacity_bytes": 65536, "AtroposGateway.checkpoint_interval": -1, "SamplingParams.top_k": -1}
"""The least that is meant, where that is neither 0 nor 1."""

FROM_ZERO = {
    *(
        "Backoff.first_s",
        "Backoff.longest_s",
        "JsonlMetrics.after_step",
        "Packer.max_tokens",
        "processes.restarts",
        "processes.stop_timeout_s",
        "ray.num_cpus",
        "ray.num_gpus",
        "ray.restarts",
        "ray.stop_timeout_s",
        "joining.stop_timeout_s",
    ),
    *(
        "ReplayingSender.reconnect_timeout_s",
        "connect_with_replay.reconnect_timeout_s",
        "SinkTrainer.cancel_timeout_s",
        "WeightPublisher.release_timeout_s",
    ),
    *("source.max_lag", "SourceEnv.groups", "SourceEnv.first_task", "Demonstrations.first", "ServerConfig.port"),
    "Prometheus.port",
    *("OutsideServer.ready_timeout_s", "OutsideServer.stop_timeout_s", "AtroposGateway.num_steps"),
    *("AtroposClient.num_steps", "AtroposClient.starting_step", "AtroposClient.save_checkpoint_interval"),
    *("AtroposClient.first_pause_s", "AtroposClient.longest_pause_s", "AtroposClient.away_s"),
    *("DataProtoBatches.pad_token_id", "DataProtoBatches.step", "Critic.warmup_steps"),
}


class Number(NamedTuple):
    """An argument that is a count or a number of seconds."""

    owner: str
    name: str
    whole: bool
    optional: bool

    @property
    def label(self) -> str:
        return f"{self.owner}.{self.name}"

    @property
    def least(self) -> int:
        return LEAST.get(self.label, 0 if self.label in FROM_ZERO else 1)

    def make(self, value: object) -> Any:
        return MAKING[self.owner](**{self.name: value})


def numbers_of(owner: str) -> Iterator[Number]:
    if not (inspect.isroutine(getattr(PUBLIC, owner)) or inspect.isclass(getattr(PUBLIC, owner))):
        return
    if inspect.isclass(getattr(PUBLIC, owner)) and issubclass(getattr(PUBLIC, owner), Exception):
        return
    for parameter in inspect.signature(getattr(PUBLIC, owner)).parameters.values():
        kinds = set(re.findall(r"\w+", str(parameter.annotation)))
        if parameter.name not in NO_COUNTS and kinds <= {"class", "int", "float", "None"} and kinds & {"int", "float"}:
            yield Number(owner, parameter.name, "int" in kinds, "None" in kinds)


NUMBERS = [number for owner in MAKING for number in numbers_of(owner)]


@pytest.fixture(autouse=True)
def _files_go_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_public_name_that_takes_a_number_is_in_the_table() -> None:
    assert {name for name in set(vars(PUBLIC)) - RESULTS - BUILDERS - RATIOS if any(numbers_of(name))} == set(MAKING)


def test_a_number_that_makes_no_sense_is_refused_by_name() -> None:
    wrong = [
        f"{number.label}={value!r}: {answer}"
        for number in NUMBERS
        for value in senseless_values(number)
        if not re.search(refusal_of(number, value), answer := answer_to(number, value))
    ]

    assert not wrong, "\n".join(wrong)


def senseless_values(number: Number) -> list[object]:
    senseless = [2.5, number.least - 1] if number.whole else [math.inf, -1.0]
    return [math.nan, True, "4", *senseless, *([] if number.optional else [None])]


def refusal_of(number: Number, value: object) -> str:
    return rf"{number.name}: expected a .* number .*, got {re.escape(repr(value))}"


def answer_to(number: Number, value: object) -> str:
    """Return the words with which `value` is refused."""
    try:
        number.make(value)
    except InvalidConfig as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 (listed with the others)
        return f"raises {error!r}"
    return "is accepted"


def test_a_scalar_of_numpy_is_taken_for_the_number_that_it_is() -> None:
    wrong = [number.label for number in NUMBERS if not takes_a_scalar(number)]

    assert not wrong, "\n".join(wrong)


def takes_a_scalar(number: Number) -> bool:
    """Return whether what is made of a scalar of numpy holds a number of Python, or passes it on to a part of it."""
    made = number.make(np.int64(max(number.least, 4)) if number.whole else np.float32(4))
    held = is_dataclass(made) and number.name in {field.name for field in fields(made)}
    return not held or type(getattr(made, number.name)) is (int if number.whole else float)


def test_a_bound_given_as_an_integer_of_numpy_is_still_a_bound() -> None:
    sampling = MAKING["SourceEnv"](max_length=np.int64(64), group_size=np.int64(4))
    batching = PUBLIC.Batcher(np.int64(128))
    pipeline = PUBLIC.source(sampling).then(batching).sink(SinkTrainer(Idle()))

    with pytest.raises(InvalidPipeline, match="a group may hold 256 tokens, and Batcher takes at most 128"):
        pipeline.check()
