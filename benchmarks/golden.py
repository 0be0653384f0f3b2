"""Rewards of the task of `penstock init --tiny`, learnt by a model of attention, a hybrid and a mixture of experts.

python -m benchmarks.golden --seeds 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
"""Of `penstock init --tiny`."""

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
}

LAST = 5
"""Steps whose mean reward is the end of the curve."""


def main() -> None:
    """Run each family with each seed, and print the rewards of the first and the last steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each family")
    parser.add_argument("--steps", type=int, default=120, help="steps of a run")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("set", nargs="*", help="keys of the configuration, as for penstock run")
    given = parser.parse_args()
    table = Table("family", *[f"seed {seed}" for seed in range(given.seeds)], title=f"reward after {given.steps} steps")
    for family in given.families:
        ends = list[str]()
        for seed in range(given.seeds):
            rewards = run(family, seed, [f"algorithm.steps={given.steps}", *given.set])
            ends.append(f"{statistics.mean(rewards[:LAST]):.2f} → {statistics.mean(rewards[-LAST:]):.2f}")
            sys.stderr.write(f"{family}, seed {seed}: {ends[-1]}\n")
        table.add_row(family, *ends)
    Console().print(table)


def run(family: str, seed: int, keys: list[str]) -> list[float]:
    """Return the reward of each step of a run of a new model of `family`."""
    with TemporaryDirectory() as made:
        folder = Path(made) / "task"
        _penstock(["init", "--tiny", str(folder)], Path(made))
        _write_model(family, seed, folder / "model")
        _penstock(["run", "config.yaml", f"seed={seed}", *keys], folder)
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [line["reward"] for line in lines if "reward" in line]


def _write_model(family: str, seed: int, folder: Path) -> None:
    """Write a model of `family` with random weights in place of the one in `folder`."""
    tokens = json.loads((folder / "config.json").read_text("utf-8"))["vocab_size"]
    import torch  # noqa: PLC0415 (a run of its own imports it)
    import transformers  # noqa: PLC0415 (as above)

    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, vocab_size=tokens, **SHAPE, **FAMILIES[family])
    auto: Any = transformers.AutoModelForCausalLM
    auto.from_config(config).save_pretrained(folder)


def _penstock(arguments: list[str], folder: Path) -> None:
    command = [sys.executable, "-m", "penstock", *arguments]
    ended = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)  # noqa: S603 (penstock itself)
    if ended.returncode:
        raise RuntimeError(f"penstock {arguments[0]}: {(ended.stderr.strip() or ended.stdout).splitlines()[-1]}")


if __name__ == "__main__":
    main()
