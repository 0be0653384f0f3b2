"""A step of TorchTrainer: tokens a second, as a share of the rate of the model's matrix products alone.

    python -m benchmarks.training [--device cuda] [--layers 24 --width 2048 --heads 16 --vocabulary 32000]

The roofline: each matrix of the model times the tokens of a micro-batch, once forwards and twice backwards, measured on
the same device, in the same dtype, directly after the steps. All other work of a step (attention, normalisation, the
softmax over the vocabulary, the loss, the optimizer, laying out rows) is the difference to 1.

In turn: float32, bfloat16 by autocast, and both compiled. Ways that this machine cannot compile are skipped.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from rich.console import Console

from penstock import TrainBatch, TrajectoryGroup
from penstock.losses import PPOClip
from penstock.torch import TorchTrainer

from .decoder import Decoder, Size
from .report import command_line, print_table, short, write_json

__all__ = ["main"]

PARTS = "prepare", "forward", "backward", "optimizer"

GROUP = 8

WARM_UP_STEPS = 2

SLICES = 5
"""Number of parts of a measurement of the roofline, whose median counts."""

Compile: TypeAlias = Callable[[Any], Any]


class Way(NamedTuple):
    """A way to compute a step."""

    name: str
    dtype: torch.dtype
    compile: Compile | None


WAYS = [
    Way("float32", torch.float32, None),
    Way("bfloat16", torch.bfloat16, None),
    Way("float32, compiled", torch.float32, partial(torch.compile, dynamic=True)),
    Way("bfloat16, compiled", torch.bfloat16, partial(torch.compile, dynamic=True)),
]


class Result(NamedTuple):
    """The result of steps of one way."""

    way: str
    tokens_per_s: float
    roofline: float
    """Tokens a second of the matrix products alone."""
    seconds: dict[str, float]
    """Time of a step, by part."""


def make_batch(size: Size, tokens: int) -> TrainBatch:
    """Return a batch of groups of sequences of the model's maximum length, all tokens of which train but the first."""
    groups = []
    for number in range(max(1, tokens // (GROUP * size.longest))):
        generator = np.random.default_rng(number)
        length = GROUP * size.longest
        groups.append(
            TrajectoryGroup.build(
                env="bench",
                instance_id=str(number),
                tokens=generator.integers(size.vocabulary, size=length),
                offsets=np.arange(GROUP + 1) * size.longest,
                loss_mask=np.arange(length) % size.longest > 0,
                rewards=generator.normal(size=GROUP),
                behavior_logprobs=np.full(length, -np.log(size.vocabulary)),
                advantages=generator.normal(size=length),
            )
        )
    return TrainBatch.pack(groups)


def timed(work: Callable[[], object], seconds: float, device: torch.device) -> float:
    """Return the seconds of a call of `work` on `device`: the median of several parts."""
    work()
    per_call: list[float] = []
    for _ in range(SLICES):
        calls, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds / SLICES:
            work()
            calls += 1
            _finish(device)
        per_call.append((time.perf_counter() - began) / calls)
    return statistics.median(per_call)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def roofline(model: Decoder, tokens: int, dtype: torch.dtype, seconds: float, device: torch.device) -> float:
    """Return tokens a second of the matrix products of a step alone, `tokens` at a time."""
    needed = Counter(model.products())
    total = 0.0
    for (inputs, outputs), count in needed.items():
        x = torch.randn(tokens, inputs, dtype=dtype, device=device)
        weight = torch.randn(outputs, inputs, dtype=dtype, device=device)
        gradient = torch.randn(tokens, outputs, dtype=dtype, device=device)

        def forwards_and_backwards(x: Any = x, weight: Any = weight, gradient: Any = gradient) -> None:
            torch.mm(x, weight.T)
            torch.mm(gradient, weight)
            torch.mm(gradient.T, x)

        total += count * timed(forwards_and_backwards, seconds / len(needed), device)
    return tokens / total


def steps(way: Way, size: Size, batch: TrainBatch, options: argparse.Namespace) -> Result:
    """Train for a while and measure the time."""
    device = torch.device(options.device)
    torch.manual_seed(0)
    torch.compiler.reset()  # it stops compiling code that it has compiled for many models
    model = Decoder(size).to(device)
    trainer = TorchTrainer(
        model,
        optimizer=partial(torch.optim.AdamW, lr=1e-5, fused=device.type == "cuda"),
        loss=PPOClip(),
        micro_batch_tokens=options.micro_batch_tokens,
        autocast=None if way.dtype == torch.float32 else way.dtype,
        compile=way.compile,
    )
    for _ in range(WARM_UP_STEPS):
        trainer.step(batch)
    took: list[dict[str, float]] = []
    began = time.perf_counter()
    while not took or time.perf_counter() - began < options.seconds:
        took.append(trainer.step(batch))
    elapsed = time.perf_counter() - began
    limit = roofline(model, min(options.micro_batch_tokens, batch.tokens.size), way.dtype, options.seconds, device)
    seconds = {part: statistics.median(step[f"timing_s/{part}"] for step in took) for part in PARTS}
    return Result(way.name, len(took) * batch.tokens.size / elapsed, limit, seconds)


def measure(options: argparse.Namespace, console: Console) -> list[Result]:
    """Measure every way in turn, `repeats` times."""
    from torch._dynamo.exc import BackendCompilerFailed  # noqa: PLC0415 (takes seconds; its only name)

    size = Size(options.vocabulary, options.layers, options.width, options.heads, options.longest)
    batch = make_batch(size, options.batch_tokens)
    ways, results = list(WAYS), []
    for _ in range(options.repeats):
        for way in list(ways):
            try:
                results.append(steps(way, size, batch, options))
            except BackendCompilerFailed as failed:
                reason = str(failed).strip().splitlines()[0]
                console.print(f"{way.name}: skipped, {reason}", highlight=False, markup=False)
                ways.remove(way)
    return results


def show(results: list[Result], console: Console) -> None:
    """Print the results."""
    rows = []
    for name in dict.fromkeys(result.way for result in results):
        of_way = [result for result in results if result.way == name]
        whole = [sum(result.seconds.values()) for result in of_way]
        rows.append(
            [
                name,
                short(statistics.median(result.tokens_per_s for result in of_way)),
                f"{statistics.median(result.tokens_per_s / result.roofline for result in of_way):.2f}",
                *(
                    f"{100 * statistics.median(r.seconds[part] / w for r, w in zip(of_way, whole, strict=True)):.0f}"
                    for part in PARTS
                ),
            ]
        )
    title = "a step of TorchTrainer: its share of the roofline, and its parts in %"
    print_table(console, title, ("way", "tok/s", "share", *PARTS), rows)


def main() -> None:
    """Parse the command line, measure, and print the results."""
    parser = command_line(__doc__, seconds=3.0, repeats=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--longest", type=int, default=256, help="tokens of every sequence")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--micro-batch-tokens", type=int, default=2048)
    options = parser.parse_args()
    console = Console()
    results = measure(options, console)
    show(results, console)
    shape = {name: value for name, value in vars(options).items() if name != "json"}
    write_json(options.json, {"options": shape, "rows": [result._asdict() for result in results]})


if __name__ == "__main__":
    main()
