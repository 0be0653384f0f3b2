"""A step of TorchTrainer on a transformers model: seconds, and growth of memory, by vocabulary and micro-batch.

    python -m benchmarks.step_memory [--vocabularies 8192 151936] [--micro-batch-tokens 1024 4096 0] [--kinds adapters]

A Qwen2 with random weights trains, in float32 or as another of `KINDS`, on sequences of different lengths, half prompt
and half completion. Each measurement is a process of its own, in turn; a micro-batch of 0 tokens is the whole batch.
The growth is the peak of the resident memory over that before the first step: gradients and moments of AdamW,
activations, and tiles of logits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console

from penstock import TrainBatch, TrajectoryGroup
from penstock.losses import PPOClip
from penstock.models import HFModel, LoRA
from penstock.torch import TorchTrainer, adamw

from .machine import peak_from_here, resident_mb
from .report import command_line, print_table, write_json

__all__ = ["Measured", "make_batch", "make_model", "measure_step"]

GROUP = 8

KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {},
    "checkpointing": {"gradient_checkpointing": True},
    "adapters": {"lora": LoRA(rank=16)},
}
"""Options of the model; with `bfloat16` its trainer computes in it where that is safe."""


class Measured(NamedTuple):
    """The cost of steps."""

    seconds: float
    """Median time of all steps after the first."""
    cpu_s: float
    """Median processor time of them, which other processes of the machine change less."""
    grown_mb: float
    """Peak of the resident memory, over that before the first step."""
    loss: float
    grad_norm: float
    """Those of the first step: equal, up to rounding, for every micro-batch."""


def make_model(vocabulary: int, width: int, layers: int, kind: str = "float32") -> HFModel:
    """Return a Qwen2 with random weights and tied embeddings, of one of `KINDS`."""
    import transformers  # noqa: PLC0415 (takes seconds)

    config = transformers.Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        auto: Any = transformers.AutoModelForCausalLM
        auto.from_config(config).save_pretrained(folder)
        return HFModel.from_pretrained(folder, **KINDS[kind])


def make_batch(vocabulary: int, sequences: int, completion: int) -> TrainBatch:
    """Return groups of prompts and completions of `completion` / 2 to `completion` tokens each."""
    groups = []
    for number in range(sequences // GROUP):
        random = np.random.default_rng(number)
        lengths = random.integers(completion // 2, completion, size=GROUP, endpoint=True)
        prompt = int(random.integers(completion // 2, completion, endpoint=True))
        offsets = np.append(0, (lengths + prompt).cumsum())
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths + prompt)
        trains = within >= prompt
        groups.append(
            TrajectoryGroup.build(
                env="bench",
                instance_id=str(number),
                tokens=random.integers(vocabulary, size=offsets[-1]),
                offsets=offsets,
                loss_mask=trains,
                rewards=random.normal(size=GROUP),
                behavior_logprobs=np.where(trains, -np.log(vocabulary), 0),
                advantages=random.normal(size=offsets[-1]),
            )
        )
    return TrainBatch.pack(groups)


def measure_step(trainer: Any, batch: TrainBatch, steps: int) -> Measured:
    """Return the cost of a step of `trainer`; the process must have done nothing larger before."""
    before = peak_from_here()
    first = trainer.step(batch)
    took: list[tuple[float, float]] = []
    for _ in range(steps):
        began = time.perf_counter(), time.process_time()
        trainer.step(batch)
        took.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    grown = resident_mb("VmHWM") - before
    seconds, cpu_s = map(statistics.median, zip(*took, strict=True))
    return Measured(seconds, cpu_s, grown, first["loss"], first["grad_norm"])


def measure(options: argparse.Namespace, kind: str, vocabulary: int, micro_batch_tokens: int) -> Measured:
    """Measure one configuration in this process."""
    torch.set_num_threads(options.threads)
    model = make_model(vocabulary, options.width, options.layers, kind)
    trainer = TorchTrainer(
        model,
        optimizer=partial(adamw, lr=1e-5),
        loss=PPOClip(),
        micro_batch_tokens=micro_batch_tokens or None,
        autocast=torch.bfloat16 if kind == "bfloat16" else None,
    )
    return measure_step(trainer, make_batch(vocabulary, options.sequences, options.completion), options.steps)


def in_a_process(arguments: list[str], kind: str, vocabulary: int, micro_batch_tokens: int) -> Measured:
    """Measure one configuration in a process of its own, with these arguments of the command line."""
    one = ["--one", kind, str(vocabulary), str(micro_batch_tokens)]
    command = [sys.executable, "-m", "benchmarks.step_memory", *arguments, *one]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603 (this module itself)
    return Measured(*json.loads(ended.stdout.splitlines()[-1]))


def show(found: dict[tuple[str, int, int], list[Measured]], console: Console) -> None:
    """Print the medians."""
    rows = [
        [
            f"{kind}, {vocabulary:,}",
            f"{tokens:,}" if tokens else "whole batch",
            f"{statistics.median(each.seconds for each in measured):.2f}",
            f"{statistics.median(each.cpu_s for each in measured):.2f}",
            f"{statistics.median(each.grown_mb for each in measured):,.0f}",
            f"{measured[0].loss:.6f}",
            f"{measured[0].grad_norm:.6f}",
        ]
        for (kind, vocabulary, tokens), measured in found.items()
    ]
    header = ("model, vocabulary", "micro-batch", "s/step", "CPU s", "MB grown", "loss", "grad_norm")
    print_table(console, "a step of TorchTrainer", header, rows)


def main() -> None:
    """Parse the command line, measure, and print the results."""
    parser = command_line(__doc__, seconds=None, repeats=3)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[8192, 151_936])
    parser.add_argument("--micro-batch-tokens", type=int, nargs="+", default=[1024, 4096, 0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--completion", type=int, default=128, help="tokens of the longest prompt and completion")
    parser.add_argument("--steps", type=int, default=2, help="measured steps, after one that warms up")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["float32"])
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        kind, vocabulary, tokens = options.one
        print(json.dumps(measure(options, kind, int(vocabulary), int(tokens))))
        return
    found: dict[tuple[str, int, int], list[Measured]] = {}
    for _ in range(options.repeats):
        for key in product(options.kinds, options.vocabularies, options.micro_batch_tokens):
            found.setdefault(key, []).append(in_a_process(sys.argv[1:], *key))
    show(found, Console(width=100))
    rows = [[*key, *each] for key, measured in found.items() for each in measured]
    write_json(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
