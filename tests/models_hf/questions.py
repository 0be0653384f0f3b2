"""Configured runs of a tiny model on a file of questions, in a folder of their own."""

from __future__ import annotations

import io
import json
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import torch
from safetensors.torch import load_file

from penstock.runs import Summary, load_run_config, train

REWARD = """
import itertools, os, threading

calls = itertools.count(1)


def shorter(completions, **columns):
    if next(calls) == int(os.environ.get("HELD_AT_CALL", 0)):
        print("held", flush=True)
        threading.Event().wait()
    return [1 / (1 + len(completion)) for completion in completions]


def always(completions, **columns):
    return [1.0 for completion in completions]


def broken(completions, **columns):
    raise RuntimeError("out of order")


def ready(config):
    pass
"""


@dataclass(frozen=True)
class Ran:
    """A run that has ended."""

    folder: Path
    summary: Summary
    printed: str
    threads: int
    """The number of torch's threads after it."""

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    def steps(self) -> list[dict[str, Any]]:
        """Return the lines of optimizer steps; the evaluation after the last one has a line of its own."""
        return [line for line in self.lines("metrics.jsonl") if "loss" in line]

    def evaluations(self) -> list[dict[str, Any]]:
        return [line for line in self.lines("metrics.jsonl") if "eval/step" in line]

    def weights(self) -> dict[str, torch.Tensor]:
        return weights_in(self.folder)


@dataclass(frozen=True)
class Questions:
    """A folder with questions and reward functions, and the values of a run of them."""

    folder: Path
    values: dict[str, Any]

    @property
    def module(self) -> str:
        """The module of the reward functions: of this folder alone, because a module is imported once."""
        return f"rewards_of_{self.folder.name}"

    def train(self, *overrides: str, view: Any = "lines", **sections: Any) -> Ran:
        """Train with other sections and values; return what came of it."""
        printed = io.StringIO()
        with chdir(self.folder), redirect_stderr(printed), redirect_stdout(printed):
            config = load_run_config(self.values | sections, overrides)
            summary = anyio.run(partial(train, view=view), config)
        return Ran(self.folder / config.folder, summary, printed.getvalue(), torch.get_num_threads())


def write_questions(folder: Path, model: Path) -> Questions:
    rows = [{"question": f"{a}+{b}=", "answer": a + b} for a in range(6) for b in range(4)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "hard.jsonl").write_text("".join(f'{{"question": "{n}+12="}}\n' for n in range(8)))
    questions = Questions(
        folder,
        {
            "model": {"path": str(model)},
            "data": {"path": "train.jsonl", "prompt": "question", "evaluation": 4},
            "reward": {"functions": [{"function": f"rewards_of_{folder.name}:shorter"}]},
            "algorithm": {"steps": 4, "prompts": 2, "group_size": 4, "max_lag": 0, "optimizer": {"lr": 1e-2}},
            "sampling": {"max_completion_tokens": 6},
            "checkpoint_every": 2,
        },
    )
    (folder / f"{questions.module}.py").write_text(REWARD)
    return questions


def weights_in(run: Path) -> dict[str, torch.Tensor]:
    """Return those of the last checkpoint of a run."""
    (newest,) = sorted((run / "checkpoints").glob("step-*"))[-1:]
    return load_file(newest / "model.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())
