"""Cost and effect of the experts that a mixture's engine records: bytes, processor time, and distance to the trainer.

    python -m benchmarks.routing [--repeats 3]

A Qwen3-MoE with random weights, in one process with one thread. The engine samples in bfloat16, as vLLM does, and the
trainer computes in float32. Times are ratios of processor time of alternating runs: with the record, and without.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import torch
import transformers
from rich.console import Console

from penstock import TrainBatch, TrajectoryGroup, Worker
from penstock.losses import LossValue, Scored
from penstock.models import HFModel
from penstock.policies import Completion, SamplingParams
from penstock.torch import TorchPolicy, TorchTrainer

from .report import command_line, print_table, write_json

__all__ = ["main"]

SHAPES = {"Qwen3-30B-A3B": (48, 8, 128), "DeepSeek-V3": (58, 8, 256), "Qwen3-Next-80B-A3B": (48, 10, 512)}
"""Layers with experts, experts of a token, and of a layer."""

CONFIG: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "eos_token_id": None,
}

PROMPTS, PROMPT, COMPLETION = 16, 32, 96


def write_model(folder: Path) -> None:
    """Write the model, with weights in the range of bfloat16."""
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(transformers.AutoConfig.for_model("qwen3_moe", **CONFIG))
    for parameter in model.parameters():
        parameter.data = (parameter.data + 0.06 * torch.randn_like(parameter)).bfloat16().float()
    model.save_pretrained(folder)


def seconds(work: Callable[[], object]) -> float:
    """Return the processor time of `work`."""
    began = time.process_time()
    work()
    return time.process_time() - began


async def sampled(folder: Path, *, recorded: bool) -> tuple[list[Completion], float]:
    """Return completions in bfloat16, and the processor time of sampling them."""
    prompts = [np.random.default_rng(seed).integers(1, 2000, PROMPT).astype(np.int32) for seed in range(PROMPTS)]
    make = partial(HFModel.from_pretrained, folder, dtype=torch.bfloat16)
    async with TorchPolicy(make, eos_id=2047, routed_experts=recorded).open(Worker()) as engine:
        began = time.process_time()
        found = await engine.generate(prompts, SamplingParams(max_completion_tokens=COMPLETION))
        return found, time.process_time() - began


def batch_of(completions: Sequence[Completion]) -> TrainBatch:
    """Return the completions as a batch."""
    prompt = np.arange(PROMPT)
    groups = [
        TrajectoryGroup.build(
            env="e",
            instance_id=str(number),
            sequences=[np.concatenate([np.random.default_rng(number).integers(1, 2000, PROMPT), each.tokens])],
            loss_mask=[np.arange(PROMPT + len(each.tokens)) > prompt[-1]],
            rewards=[1.0],
            behavior_logprobs=[np.append(np.zeros(PROMPT), each.logprobs)],  # type: ignore[arg-type]  # it has some
            routed_experts=each.routed_experts,
        ).with_advantages([1.0])
        for number, each in enumerate(completions)
    ]
    return TrainBatch.pack(groups)


class Distance:
    """A loss without gradient, which keeps the log-ratios of the trainer's to the engine's probabilities."""

    def __init__(self) -> None:
        self.log_ratios: list[torch.Tensor] = []

    def __call__(self, scored: Scored) -> LossValue:
        """Return the loss; see `Loss`."""
        self.log_ratios.append(scored.log_ratio("behavior").detach())
        return LossValue(0 * scored.logprobs.sum(), {})


def distances(model: HFModel, batch: TrainBatch, mode: Any) -> torch.Tensor:
    """Return the log-ratios of a step."""
    loss = Distance()
    TorchTrainer(model, optimizer=partial(torch.optim.SGD, lr=0.0), loss=loss, router_replay=mode).step(batch)
    return torch.cat(loss.log_ratios).abs()


def trained(folder: Path, batch: TrainBatch) -> dict[str, TorchTrainer]:
    """Return trainers with and without the record, after a first step."""
    sgd = partial(torch.optim.SGD, lr=1e-6)
    modes: dict[str, Any] = {"without": None, "R3": "R3"}
    found = {
        name: TorchTrainer(HFModel.from_pretrained(folder), optimizer=sgd, router_replay=m) for name, m in modes.items()
    }
    for trainer in found.values():
        trainer.step(batch)
    return found


def packed(tokens: int, shape: tuple[int, int, int] | None) -> Callable[[], object]:
    """Return the packing of a group of so many tokens into a batch."""
    columns: dict[str, Any] = {}
    if shape is not None:
        layers, chosen, experts = shape
        dtype = np.uint8 if experts <= 2**8 else np.uint16
        columns["routed_experts"] = (
            np.random.default_rng(0).integers(0, experts, (tokens, layers, chosen)).astype(dtype)
        )
    group = TrajectoryGroup.build(
        env="e",
        instance_id="0",
        tokens=np.ones(tokens, np.int32),
        offsets=[0, tokens],
        loss_mask=np.arange(tokens) > 0,
        rewards=[1.0],
        behavior_logprobs=np.zeros(tokens, np.float32),
        **columns,
    )
    return partial(TrainBatch.pack, [group])


def main() -> None:
    """Measure, and print tables."""
    options = command_line(__doc__, seconds=None, repeats=3).parse_args()
    torch.set_num_threads(1)
    console, report = Console(width=120), dict[str, Any]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder)
        ratios: dict[str, list[float]] = {"sampling": [], "step": []}
        completions: list[Any] = []
        for repeat in range(options.repeats):
            plain, without = anyio.run(partial(sampled, folder, recorded=False))
            completions, recorded = anyio.run(partial(sampled, folder, recorded=True))
            ratios["sampling"].append(recorded / without)
            print(f"repeat {repeat}: {len(plain)} completions, {without:.2f} and {recorded:.2f} s", file=sys.stderr)
        batch = batch_of(completions)
        trainers = trained(folder, batch)
        for _ in range(options.repeats):
            times = {name: seconds(partial(trainer.step, batch)) for name, trainer in trainers.items()}
            ratios["step"].append(times["R3"] / times["without"])
        rows = [
            [name, f"{np.median(values):.3f}", f"{min(values):.3f}–{max(values):.3f}"]
            for name, values in ratios.items()
        ]
        print_table(
            console, "processor time with the record, as a share of that without", ("", "median", "range"), rows
        )
        report["ratios"] = ratios
        free = msgspec.structs.replace(batch, routed_experts=None)
        found = {"free": distances(HFModel.from_pretrained(folder), free, None)}
        found["R3"] = distances(HFModel.from_pretrained(folder), batch, "R3")
        rows = [
            [name, f"{each.mean():.4f}", f"{each.quantile(0.99):.4f}", f"{each.max():.4f}"]
            for name, each in found.items()
        ]
        print_table(
            console,
            "|log-ratio| of a trainer in float32 to an engine in bfloat16",
            ("", "mean", "99 %", "largest"),
            rows,
        )
        report["distances"] = {name: each.tolist() for name, each in found.items()}
    tokens, rows = 16_384, []
    bare = min(seconds(packed(tokens, None)) for _ in range(options.repeats))
    for name, shape in SHAPES.items():
        nbytes = shape[0] * shape[1] * (1 if shape[2] <= 2**8 else 2)
        took = min(seconds(packed(tokens, shape)) for _ in range(options.repeats))
        rows.append([name, str(nbytes), f"{nbytes * tokens / 2**20:.1f}", f"{1e3 * (took - bare):.1f}"])
    head = ("", "bytes a token", f"MiB of {tokens:,} tokens", "ms to copy them into a batch")
    print_table(console, "the column", head, rows)
    write_json(options.json, report)


if __name__ == "__main__":
    main()
