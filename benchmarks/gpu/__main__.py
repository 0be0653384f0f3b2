"""What penstock costs on a GPU, in eight minutes: a step, its kernels, sampling, publication, a run, and TRL's step.

    python -m benchmarks.gpu --json runs/gpu.json
    python -m benchmarks.gpu --device cpu --cases tiny tiny-adapters --batch-tokens 1024 --shortest 16 --longest 64

Models have the shapes of Qwen2.5 and random weights. No file is downloaded. A part begins within the first seven
minutes, or is reported as left out. The JSON is written after each part, and the table beside it as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from rich.console import Console

from ..report import command_line, count, median_of, print_table, write_json
from .cases import CASES, Case, Load
from .devices import Device
from .golden import measure_golden_run
from .parts import Part, Result, run_parts
from .peer import measure_trl
from .serving import measure_publication, measure_sampling
from .step import GROUPS, measure_step

__all__ = ["main", "measure", "parts_of", "show"]

Measure: TypeAlias = Callable[[Case, Load, Device], dict[str, Any]]

BEGIN_WITHIN_S = 420.0
"""Seconds in which parts begin: eight minutes less the longest of them."""

ON_A_GPU = ("0.5b", "1.5b", "7b-adapters")

WIDTH = 132
"""Columns of the tables."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, and print the tables."""
    sizes = Load()
    parser = command_line(__doc__, seconds=None, repeats=sizes.repeats)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=ON_A_GPU, help="models with random weights")
    parser.add_argument("--batch-tokens", type=count, default=sizes.batch_tokens, help="tokens of a step")
    parser.add_argument("--shortest", type=count, default=sizes.shortest, help="tokens of the shortest sequence")
    parser.add_argument("--longest", type=count, default=sizes.longest, help="tokens of the longest sequence")
    parser.add_argument("--rows", type=count, default=sizes.rows, help="prompts that are sampled at once")
    parser.add_argument("--prompt", type=count, default=sizes.prompt, help="tokens of a prompt")
    parser.add_argument("--completion", type=count, default=sizes.completion, help="tokens of a completion")
    parser.add_argument("--golden-steps", type=count, default=sizes.golden_steps, help="steps of the golden run")
    options = parser.parse_args(arguments)
    load = Load(**{name: getattr(options, name) for name in Load._fields})
    results = measure(Device.of(options.device), options.cases, load, options.json)
    raise SystemExit(any(result.state == "failed" for result in results))


def measure(
    device: Device, cases: Sequence[str], load: Load, path: Path | None, begin_within_s: float = BEGIN_WITHIN_S
) -> list[Result]:
    """Measure all parts, print the tables, and write both to `path`, if there is one."""
    console = Console(width=WIDTH, record=True)
    about = {"about": device.described(), "load": load._asdict(), "cases": list(cases)}

    def report(results: list[Result]) -> None:
        last = results[-1]
        console.print(f"{last.part}: {last.state} {last.reason}", highlight=False, markup=False)
        write_json(path, about | {"parts": [result._asdict() for result in results]})

    results = run_parts(parts_of(device, cases, load), begin_within_s, report)
    show(device, results, console)
    if path is not None:
        console.save_text(str(path.with_suffix(".txt")))
    return results


def parts_of(device: Device, cases: Sequence[str], load: Load) -> Iterator[Part]:
    """Yield the parts; those that others are compared with come first."""
    measures: dict[str, Measure] = {
        "step": measure_step,
        "sampling": measure_sampling,
        "publication": measure_publication,
    }
    for kind, measure_case in measures.items():
        for case in cases:
            yield Part(f"{kind} {case}", partial(_measured, measure_case, CASES[case], load, device))
    yield Part("golden run", partial(measure_golden_run, load, device))
    for case in cases:
        yield Part(f"TRL {case}", partial(_measured, measure_trl, CASES[case], load, device))


def _measured(measure: Measure, case: Case, load: Load, device: Device, _: float) -> dict[str, Any]:
    """Return the numbers of a part whose repeats bound its time."""
    return measure(case, load, device)


def show(device: Device, results: Sequence[Result], console: Console) -> None:
    """Print a table of all parts, and one of the kernels of steps."""
    rows = [[result.part, *_cells(result)] for result in results]
    facts = ", ".join(f"{name} {value}" for name, value in device.described().items())
    print_table(console, facts, ("part", "tokens/s", "of peak", "s", "GB", ""), rows)
    steps = [result for result in results if "kernels" in result.numbers]
    kernels = [[each.part, *_kernels(each.numbers["kernels"])] for each in steps]
    head = ("kernels, milliseconds of", *GROUPS, "rest")
    print_table(console, "a step's kernels: number and milliseconds on the device", head, kernels)
    if ratios := _ratios(results):
        print_table(console, "tokens a second of penstock's step over TRL's", ("", "ratio"), ratios)


def _cells(result: Result) -> list[str]:
    """Return tokens a second, share, seconds, memory and remarks of a part."""
    numbers, unknown = result.numbers, "unknown"
    if result.state != "measured":
        return ["", "", "", "", f"{result.state}: {result.reason}"]
    rate = f"{numbers['tokens_per_s']:,.0f}" if "tokens_per_s" in numbers else ""
    share = (unknown if numbers["share"] is None else f"{numbers['share']:.3f}") if "share" in numbers else ""
    memory = numbers.get("peak_gb")
    return [rate, share, _seconds(numbers), "" if memory is None else f"{memory:.1f}", _remark(numbers)]


def _seconds(numbers: dict[str, Any]) -> str:
    if "publish_s" in numbers:
        return "; ".join(f"{name} {median_of(took, 3)}" for name, took in numbers["publish_s"].items())
    if "run_s" in numbers:
        return f"{numbers['run_s']:.1f}"
    return median_of(numbers.get("step_s") or numbers["batch_s"], 2)


def _remark(numbers: dict[str, Any]) -> str:
    if "gib" in numbers:
        return f"{numbers['gib']:.2f} GiB"
    if "reward" in numbers:
        return f"reward {numbers['reward']:.2f} after {numbers['steps']} steps"
    return f"{numbers['sequences']} sequences at once" if "sequences" in numbers else ""


def _kernels(groups: dict[str, dict[str, float]]) -> list[str]:
    return [f"{group['count']:,} · {group['ms']:,.1f}" for group in groups.values()]


def _ratios(results: Sequence[Result]) -> list[list[str]]:
    rates = {each.part: each.numbers["tokens_per_s"] for each in results if "tokens_per_s" in each.numbers}
    cases = [name.removeprefix("TRL ") for name in rates if name.startswith("TRL ")]
    return [[case, f"{rates[f'step {case}'] / rates[f'TRL {case}']:.2f}"] for case in cases if f"step {case}" in rates]


if __name__ == "__main__":
    main()
