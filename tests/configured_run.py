"""A configured run of a tiny model."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import yaml
from tests.letter_model import write_letter_model

from penstock.runs import load_run_config, train

LETTERS = "#abcdefgh:?"
STEPS, PROMPTS, GROUP = 3, 4, 4
TRAJECTORIES = PROMPTS * GROUP


def write_run(folder: Path, placement: dict[str, Any]) -> Path:
    """Write model, data, reward and configuration into `folder`; return the path of the configuration."""
    write_letter_model(folder / "model", LETTERS)
    rows = [{"prompt": f"{a}{b}:"} for a in "abcd" for b in "abcd"]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "data.jsonl"), "chat": False},
        "reward": {"functions": [{"function": "tests.configured_run:letters_e"}]},
        "algorithm": {"steps": STEPS, "prompts": PROMPTS, "group_size": GROUP, "optimizer": {"lr": 1e-2}},
        "sampling": {"max_completion_tokens": 6},
        "placement": {"samplers": 2, **placement},
        "folder": str(folder / "run"),
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder / "config.yaml"


def letters_e(completions: list[str], **_: object) -> list[float]:
    """Return the number of letters e in each completion."""
    return [float(completion.count("e")) for completion in completions]


PRECISIONS = {
    "bfloat16": ["model.precision=bfloat16"],
    "float16": ["model.precision=float16"],
    "base in bfloat16": ["model.base_dtype=bfloat16", "algorithm.kl=0.1"],
    "adapters": ["model.precision=bfloat16", "model.base_dtype=bfloat16", "model.lora={rank: 4}"],
}
"""Values of a configuration that decide the dtypes of a run, by name."""


def check_precision(folder: Path, name: str, device: str) -> None:
    """Check that a run of these dtypes on `device` trains every step, on samples that its trainer finds likely."""
    config = load_run_config(write_run(folder, {"samplers": 1, "device": device}), PRECISIONS[name])

    summary = anyio.run(partial(train, config, view=None))

    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert summary.steps == len(steps) == STEPS
    assert all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in steps)
    assert steps[0]["kl"] < 1e-3  # the first step has the weights that sampled
