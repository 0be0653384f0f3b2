"""A tiny Qwen2 whose tokens are letters, and prompts that are answered best by one of them: what SkyRL trains."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.letter_model import write_letter_model

from penstock import (
    Flow,
    ReceiveChannel,
    RewardBridge,
    SendChannel,
    SourceEnv,
    TrajectoryGroup,
    drop,
    here,
    processes,
    source,
)
from penstock.integrations.skyrl import PenstockGenerator, SampleRequests, SkyRLPrompts
from penstock.models import HFModel
from penstock.policies import NoOpPolicy, PretrainedTokenizer, SamplingParams
from penstock.rewards import trl_reward
from penstock.torch import TorchPolicy
from penstock.weights import WeightPublisher

LETTERS = "#abcdefghijklmnopqrstuvwxyz :"
PROMPT = 3
"""Letters with which a prompt begins; they differ."""
COMPLETION = 6
GROUP = 4
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% if message['role'] != 'assistant' %} {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}:{% endif %}"
)


def write_model(folder: Path, *, width: int = 32, layers: int = 2) -> Path:
    """Write a model of `LETTERS` with a chat template into `folder`; return it."""
    return write_letter_model(folder, LETTERS, template=TEMPLATE, width=width, layers=layers)


def write_prompts(path: Path, count: int = 64) -> Path:
    """Write SkyRL's data set of `count` prompts of three letters, which all ask for the letter e."""
    rows = []
    for number in range(count):
        text = "".join(LETTERS[1 + (number // 26**place) % 26] for place in range(PROMPT))
        reward = {"method": "rule", "ground_truth": "e"}
        rows.append({"prompt": [{"role": "user", "content": text}], "env_class": "letters", "reward_spec": reward})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def share(completion: str, reward_spec: dict[str, str]) -> float:
    """Return the share of the letter that the row asks for, among those that fit."""
    return completion.count(reward_spec["ground_truth"]) / COMPLETION


def shares(completions: list[list[dict[str, str]]], reward_spec: list[dict[str, str]], **_: Any) -> list[float]:
    """Return `share` for each completion, a list of one message: a reward function of TRL's shape."""
    return [share(said["content"], spec) for (said,), spec in zip(completions, reward_spec, strict=True)]


def publisher_of(folder: str) -> WeightPublisher:
    """Return a publisher of a model like that in `folder`; takes no memory for one."""
    return WeightPublisher(HFModel.empty(folder).state_dict())


def flow_of(
    requests: Any, folder: str, url: str | None, workers: int = 0, restarts: int = 2, **options: Any
) -> Flow[TrajectoryGroup]:
    """Return a flow that answers SkyRL's requests, here or in `workers` processes."""
    tokenizer = PretrainedTokenizer(folder)
    make_model = partial(HFModel.empty if url else HFModel.from_pretrained, folder)
    policy = TorchPolicy(make_model, eos_id=tokenizer.eos_id, weights=url)
    options = {"sampling": SamplingParams(seed=0)} | options
    env = SourceEnv(SkyRLPrompts, policy, tokenizer, **options)
    placed = processes(workers, restarts=restarts) if workers else here()
    rewards = RewardBridge(functions=[trl_reward(shares)])
    return source(requests).then(SampleRequests(env), on=placed).then(rewards)


def generator(cfg: Any, tokenizer: Any, **options: Any) -> PenstockGenerator:
    """Return the generator of an experiment whose weights are published."""
    folder = cfg.trainer.policy.model.path
    publisher = publisher_of(folder)
    return PenstockGenerator(
        lambda requests: flow_of(requests, folder, publisher.url, **options), cfg, tokenizer, publisher=publisher
    )


def in_two_processes(cfg: Any, tokenizer: Any) -> PenstockGenerator:
    """Return the generator whose samplers are two processes."""
    return generator(cfg, tokenizer, workers=2)


def without_weights(cfg: Any, tokenizer: Any) -> PenstockGenerator:
    """Return a generator whose samplers keep the weights that they begin with."""
    folder = cfg.trainer.policy.model.path
    return PenstockGenerator(lambda requests: flow_of(requests, folder, None, workers=2), cfg, tokenizer)


class Dies:
    """An environment whose process is killed by its first rollout."""

    async def rollout(self, task: int, repetition: int) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError(task, repetition)


class Fails:
    """An environment that always raises."""

    async def rollout(self, task: int, repetition: int) -> Any:  # noqa: ARG002 (of the protocol)
        raise ValueError("no such letter")


@dataclass(frozen=True)
class Ends:
    """A stage that receives one group, and ends the stream."""

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:  # noqa: ARG002
        async for group in inbox:
            drop(group, "filtered", "the end")
            return


def in_one_process_that_dies(cfg: Any, tokenizer: Any) -> PenstockGenerator:
    """Return a generator whose only sampler dies, and may not be restarted."""
    sampling = SampleRequests(SourceEnv(Dies, NoOpPolicy()))
    return PenstockGenerator(
        lambda requests: source(requests).then(sampling, on=processes(1, restarts=0)), cfg, tokenizer
    )


def that_always_fails(cfg: Any, tokenizer: Any) -> PenstockGenerator:
    """Return a generator whose environment always raises."""
    sampling = SampleRequests(SourceEnv(Fails, NoOpPolicy()))
    return PenstockGenerator(lambda requests: source(requests).then(sampling), cfg, tokenizer)


def that_ends(cfg: Any, tokenizer: Any) -> PenstockGenerator:
    """Return a generator whose flow ends."""
    return PenstockGenerator(lambda requests: source(requests).then(Ends()), cfg, tokenizer)


def nothing(cfg: Any, tokenizer: Any) -> None:
    """Return no generator."""


def in_one_process(cfg: Any, tokenizer: Any) -> PenstockGenerator:
    """Return the generator whose sampler is one process."""
    return generator(cfg, tokenizer, workers=1)
