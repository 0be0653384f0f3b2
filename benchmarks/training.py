r"""A step of TorchTrainer: tokens a second, as a share of the rate of the model's matrix products alone.

    python -m benchmarks.training [--layers 24 --width 2048 --heads 16 --vocabulary 32000]
    python -m benchmarks.training --device cuda --shape qwen2.5-0.5b --shortest 256 --longest 2048 \
        --batch-tokens 65536 --micro-batch-tokens 3072 auto --ways "bfloat16, plain" bfloat16

The roofline: each matrix of the model times the tokens of a micro-batch, once forwards and twice backwards, measured on
the same device, in the same dtype, directly after the steps. All other work of a step (attention, normalisation, the
softmax over the vocabulary, the loss, the optimizer, laying out rows) is the difference to 1.

In turn: float32, bfloat16 by autocast, and both compiled; and bfloat16 without the kernels that a CUDA device has for
packed rows and for the head, with masks and a head in float32, as on a CPU. Ways that this machine cannot compile are
skipped. The model is a small decoder, or with `--shape` a model of transformers with random weights.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console

from penstock import TrainBatch, TrajectoryGroup
from penstock.losses import PPOClip
from penstock.models import HFModel, LoRA
from penstock.torch import TorchTrainer, adamw

from .decoder import Decoder, Size
from .report import command_line, print_table, short, write_json
from .shapes import SHAPES, make_model

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
    kernels: bool = True
    """True if a CUDA device uses its kernels for packed rows and for the head."""


WAYS = [
    Way("float32", torch.float32, None),
    Way("bfloat16", torch.bfloat16, None),
    Way("bfloat16, plain", torch.bfloat16, None, kernels=False),
    Way("float32, compiled", torch.float32, partial(torch.compile, dynamic=True)),
    Way("bfloat16, compiled", torch.bfloat16, partial(torch.compile, dynamic=True)),
]


class Result(NamedTuple):
    """The result of steps of one way."""

    way: str
    shape: str | None
    """The model of transformers; None for the decoder."""
    micro_batch_tokens: int
    tokens_per_s: float
    roofline: float
    """Tokens a second of the matrix products alone."""
    seconds: dict[str, float]
    """Time of a step, by part."""
    gigabytes: float
    """Largest memory of a step on a CUDA device; 0 on others."""


def make_batch(size: Size, tokens: int, shortest: int | None = None) -> TrainBatch:
    """Return a batch of groups of sequences, all tokens of which train but the first.

    Their lengths are drawn between `shortest` and the model's maximum; None for the maximum.
    """
    groups = []
    mean = (size.longest + (size.longest if shortest is None else shortest)) // 2
    for number in range(max(1, tokens // (GROUP * mean))):
        generator = np.random.default_rng(number)
        lengths = generator.integers(size.longest if shortest is None else shortest, size.longest + 1, GROUP)
        offsets = np.append(0, lengths.cumsum())
        length = int(offsets[-1])
        groups.append(
            TrajectoryGroup.build(
                env="bench",
                instance_id=str(number),
                tokens=generator.integers(size.vocabulary, size=length),
                offsets=offsets,
                loss_mask=~np.isin(np.arange(length), offsets),
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


def products(model: torch.nn.Module) -> list[tuple[int, int]]:
    """Return (inputs, outputs) of every matrix that each token is multiplied with."""
    return [(each.in_features, each.out_features) for each in model.modules() if isinstance(each, torch.nn.Linear)]


def roofline(model: torch.nn.Module, tokens: int, dtype: torch.dtype, seconds: float, device: torch.device) -> float:
    """Return tokens a second of the matrix products of a step alone, `tokens` at a time."""
    needed = Counter(products(model))
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


@contextmanager
def without_kernels() -> Iterator[None]:
    """Compute within the body as on a device without kernels for packed rows, and with a head in float32."""
    with (
        patch("penstock._stages.losses.products.sums_in_float32", lambda _: False),
        patch("penstock._stages.contracts.varlen._kernel_on", lambda _: None),
    ):
        yield


def made_model(size: Size, options: argparse.Namespace, folder: Path) -> Decoder | HFModel:
    """Return the model that trains."""
    if options.shape is None:
        return Decoder(size).to(options.device)
    if options.lora:
        return make_model(options.shape, folder, options.device, base=torch.bfloat16, lora=LoRA(rank=options.lora))
    return make_model(options.shape, folder, options.device)


def steps(way: Way, size: Size, batch: TrainBatch, options: argparse.Namespace) -> Result:
    """Train for a while and measure the time."""
    torch.manual_seed(0)
    torch.compiler.reset()  # it stops compiling code that it has compiled for many models
    gc.collect()  # the memory of the model before
    with tempfile.TemporaryDirectory() as folder, nullcontext() if way.kernels else without_kernels():
        return _steps(way, made_model(size, options, Path(folder)), batch, options)


def _steps(way: Way, model: Decoder | HFModel, batch: TrainBatch, options: argparse.Namespace) -> Result:
    device = torch.device(options.device)
    trainer = TorchTrainer(
        model,
        optimizer=partial(adamw, lr=1e-5),
        loss=PPOClip(),
        micro_batch_tokens=options.micro_batch_tokens,
        autocast=None if way.dtype == torch.float32 else way.dtype,
        compile=way.compile,
    )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(WARM_UP_STEPS):
        trainer.step(batch)
    took: list[dict[str, float]] = []
    began = time.perf_counter()
    while not took or time.perf_counter() - began < options.seconds:
        took.append(trainer.step(batch))
    elapsed = time.perf_counter() - began
    most = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else 0.0
    tokens = trainer._micro_batch_tokens or batch.tokens.size  # noqa: SLF001 (the trainer may have chosen it)
    limit = roofline(model, min(int(tokens), batch.tokens.size), way.dtype, options.seconds, device)
    seconds = {part: statistics.median(step[f"timing_s/{part}"] for step in took) for part in PARTS}
    rate = len(took) * batch.tokens.size / elapsed
    return Result(way.name, options.shape, int(tokens), rate, limit, seconds, most)


def measure(options: argparse.Namespace, console: Console) -> list[Result]:
    """Measure every way in turn, with every shape and size of micro-batches, `repeats` times; show each at once."""
    from torch._dynamo.exc import BackendCompilerFailed  # noqa: PLC0415 (takes seconds; its only name)

    ways, results = [way for way in WAYS if not options.ways or way.name in options.ways], []
    shapes: list[str | None] = options.shape or [None]
    sizes: list[int | str] = options.micro_batch_tokens
    for _, shape, tokens in product(range(options.repeats), shapes, sizes):
        one = argparse.Namespace(**{**vars(options), "shape": shape, "micro_batch_tokens": tokens})
        vocabulary = options.vocabulary if shape is None else SHAPES[shape]["vocab_size"]
        size = Size(vocabulary, options.layers, options.width, options.heads, options.longest)
        batch = make_batch(size, options.batch_tokens, options.shortest)
        for way in list(ways):
            try:
                results.append(steps(way, size, batch, one))
            except BackendCompilerFailed as failed:
                reason = str(failed).strip().splitlines()[0]
                console.print(f"{way.name}: skipped, {reason}", highlight=False, markup=False)
                ways.remove(way)
            else:
                console.print(line_of(results[-1]), highlight=False, markup=False, soft_wrap=True)
    return results


def line_of(result: Result) -> str:
    """Return a result as a line."""
    parts = ", ".join(f"{part} {seconds:.3f} s" for part, seconds in result.seconds.items())
    what = f"{result.shape or 'decoder'}, {result.way}, micro-batches of {result.micro_batch_tokens:,}"
    return f"{what}: {result.tokens_per_s:,.0f} tokens/s, {parts}, {result.gigabytes:.1f} GB"


def show(results: list[Result], console: Console) -> None:
    """Print the results."""
    rows = []
    for key in dict.fromkeys(result[:3] for result in results):
        of_way = [result for result in results if result[:3] == key]
        name, shape, tokens = key
        rows.append(
            [
                name if shape is None else f"{shape}: {name}",
                f"{tokens:,}",
                short(statistics.median(result.tokens_per_s for result in of_way)),
                f"{statistics.median(result.tokens_per_s / result.roofline for result in of_way):.2f}",
                *(f"{statistics.median(result.seconds[part] for result in of_way):.3f}" for part in PARTS),
                f"{max(result.gigabytes for result in of_way):.1f}",
            ]
        )
    title = "a step of TorchTrainer: its share of the roofline, its parts in seconds, and its memory on the device"
    print_table(console, title, ("way", "tokens", "tok/s", "share", *PARTS, "GB"), rows)


def number_or_auto(text: str) -> int | str:
    """Return a number of tokens, or `auto`."""
    return text if text == "auto" else int(text)


def main() -> None:
    """Parse the command line, measure, and print the results."""
    parser = command_line(__doc__, seconds=3.0, repeats=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", nargs="*", choices=SHAPES, help="models of transformers, in place of the decoder")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters beside a base in bfloat16, with a shape")
    parser.add_argument("--ways", nargs="*", choices=[way.name for way in WAYS], help="by default all")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest sequence")
    parser.add_argument("--shortest", type=int, help="tokens of the shortest sequence; by default of the longest")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--micro-batch-tokens", type=number_or_auto, nargs="+", default=[2048])
    options = parser.parse_args()
    console = Console()
    results = measure(options, console)
    show(results, console)
    shape = {name: value for name, value in vars(options).items() if name != "json"}
    write_json(options.json, {"options": shape, "rows": [result._asdict() for result in results]})


if __name__ == "__main__":
    main()
