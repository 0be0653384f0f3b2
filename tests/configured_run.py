"""A configured run of a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from tests.letter_model import write_letter_model

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
