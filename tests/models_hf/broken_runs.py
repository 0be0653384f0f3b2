"""Configured runs of a tiny model, each broken by one mistake, and one that is not."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from tests.letter_model import write_letter_model

from penstock.errors import NothingTrained
from penstock.runs import load_run_config, train

REWARDS = '''
import random

numbers, others = random.Random(0), random.Random(0)  # each for one run, whose order it does not depend on


def letters_e(completions, **columns):
    """A reward that is easily raised."""
    return [text.count("e") / 4 for text in completions]


def always(completions, **columns):
    return [1.0 for text in completions]


def rarely(completions, **columns):
    return [float(text[:2] == "ef") for text in completions]


def mostly(completions, **columns):
    return [float(text[:2] != "ef") for text in completions]


def noise(completions, **columns):
    return [numbers.random() for text in completions]


def other_noise(completions, **columns):
    return [others.random() for text in completions]


def wanted(completions, letter, **columns):
    """The letters of the row's kind: training and evaluation want others."""
    return [text.count(one) / 4 for text, one in zip(completions, letter)]


def empty(completions, **columns):
    """A filter of rewards that are alike keeps the groups with an empty completion."""
    return [float(not text) for text in completions]
'''


@dataclass(frozen=True)
class Mistake:
    """Values of a configuration that keep a run from learning."""

    values: Sequence[str]
    reward: str = "letters_e"
    sections: dict[str, Any] = field(default_factory=dict)


FAST = ["algorithm.optimizer.lr=0.05", "algorithm.updates=4", "algorithm.loss=reinforce", "algorithm.steps=6"]
"""Updates without a bound; later the policy is certain of one letter, and the ratio is 1 again."""

MISTAKES = {
    "nothing_trained": Mistake(["algorithm.drop_zero_variance=true", "algorithm.group_size=64"], "always"),
    "learning_rate_zero": Mistake(["algorithm.optimizer.warmup_steps=100000"]),
    "updates_lost_in_rounding": Mistake(["algorithm.optimizer.lr=1e-12"]),
    "kl_exploding": Mistake(FAST, "noise"),
    "ratio_collapsed": Mistake(FAST, "other_noise"),
    "entropy_gone": Mistake(["sampling.temperature=0.001"]),
    "no_learning_signal": Mistake([], "always"),
    "end_tokens_never_sampled": Mistake(["sampling.top_k=1", "algorithm.optimizer.lr=1e-6", "algorithm.steps=21"]),
    "lengths_at_bound": Mistake(
        ["sampling.max_completion_tokens=2", "algorithm.optimizer.lr=1e-6", "algorithm.steps=21"]
    ),
    "prompts_too_hard": Mistake(
        ["algorithm.group_size=8", "algorithm.prompts=4", "algorithm.optimizer.lr=1e-6"], "rarely"
    ),
    "prompts_too_easy": Mistake(
        ["algorithm.group_size=8", "algorithm.prompts=4", "algorithm.optimizer.lr=1e-6"], "mostly"
    ),
    "too_old": Mistake(["algorithm.max_lag=16", "algorithm.prompts=1", "algorithm.steps=30"]),
    "most_dropped": Mistake(["algorithm.drop_zero_variance=true", "algorithm.group_size=8"], "rarely"),
    "evaluation_falls": Mistake(
        ["algorithm.steps=20", "algorithm.prompts=4", "algorithm.group_size=8"],
        "wanted",
        {
            "data": {"path": "wants_e.jsonl", "chat": False},
            "evaluation": {"every": 5, "samples": 8, "sets": [{"path": "wants_b.jsonl"}]},
        },
    ),
    "trained_differ_from_sampled": Mistake(
        ["algorithm.drop_zero_variance=true", "algorithm.group_size=2", "algorithm.optimizer.lr=1e-6"], "empty"
    ),
}
"""A mistake for each rule, by its name."""


@dataclass(frozen=True)
class Folder:
    """The model, the data and the reward functions of these runs."""

    path: Path

    def values(self, mistake: Mistake) -> dict[str, Any]:
        """Return the values of a run, without those of the mistake that are arguments."""
        rewards: dict[str, Any] = {"function": f"rewards_of_{self.path.name}:{mistake.reward}", "kind": "trl"}
        return {
            "model": {"path": str(self.path / "model")},
            "data": {"path": "data.jsonl", "chat": False},
            "reward": {"functions": [rewards]},
            "algorithm": {
                "steps": 12,
                "prompts": 2,
                "group_size": 4,
                "max_lag": 0,
                "optimizer": {"lr": 1e-2},
            },
            "sampling": {"max_completion_tokens": 4},
        } | mistake.sections

    def run(self, name: str, mistake: Mistake) -> tuple[Path, str]:
        """Run; return its folder and what it printed."""
        printed = io.StringIO()
        with chdir(self.path), redirect_stderr(printed), redirect_stdout(printed):
            config = load_run_config(self.values(mistake), [*mistake.values, f"folder={name}"])
            with suppress(NothingTrained):  # no_learning_signal ends so
                anyio.run(partial(train, view="lines"), config)
        return self.path / name, printed.getvalue()


def write_folder(path: Path) -> Folder:
    """Write model, data and rewards."""
    write_letter_model(path / "model", "#abcdefgh:?")
    pairs = [f"{a}{b}:" for a in "abcdfgh" for b in "abcdfgh"]
    for name, letter in (("data", ""), ("wants_e", "e"), ("wants_b", "b")):
        rows = [{"prompt": pair, "letter": letter} for pair in pairs]
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / f"rewards_of_{path.name}.py").write_text(REWARDS)
    return Folder(path)
