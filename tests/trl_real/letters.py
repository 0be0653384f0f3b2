"""A tiny Qwen2 whose tokens are letters, and prompts that are answered best by one of them: a flow that TRL trains."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from tests.letter_model import write_letter_model

from penstock import (
    AdvantageNormalizer,
    Flow,
    SourceEnv,
    TrajectoryGroup,
    here,
    processes,
    source,
)
from penstock.models import HFModel
from penstock.policies import PretrainedTokenizer, SamplingParams
from penstock.torch import TorchPolicy
from penstock.weights import WeightPublisher

LETTERS = "#abcdefghijklmnopqrstuvwxyz "
COMPLETION = 6
GROUP = 4


def write_model(folder: Path) -> Path:
    """Write a model of `LETTERS` into `folder`; return it."""
    return write_letter_model(folder, LETTERS)


class Prompts:
    """A scored data set: any three letters ask for the letter e."""

    def __len__(self) -> int:
        return 26**3

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"question": "".join(LETTERS[1 + (index // 26**place) % 26] for place in range(3))}

    def score_answer(self, answer: str, entry: Any) -> float:  # noqa: ARG002 (of the interface)
        """Return the share of e among the letters that fit."""
        return answer.count("e") / COMPLETION


def publisher_of(folder: Path) -> WeightPublisher:
    """Return a publisher of a model like that in `folder`; takes no memory for one."""
    return WeightPublisher(HFModel.empty(folder).state_dict())


def flow_of(
    folder: Path, url: str, workers: int = 0, restarts: int = 2, *, max_lag: int | None = 2, **options: Any
) -> Flow[TrajectoryGroup]:
    """Return a flow of groups with advantages, sampled here or by `workers` processes."""
    tokenizer = PretrainedTokenizer(folder)
    policy = TorchPolicy(partial(HFModel.empty, folder), eos_id=tokenizer.eos_id, weights=url)
    prompts = options.pop("prompts", Prompts)
    options = {"group_size": GROUP} | options
    sampling = SamplingParams(max_completion_tokens=COMPLETION)
    env = SourceEnv(prompts, policy, tokenizer, sampling=sampling, **options)
    return source(env, on=processes(workers, restarts=restarts) if workers else here(), max_lag=max_lag).then(
        AdvantageNormalizer("grpo")
    )
