"""`penstock samples`: the best and the worst samples that a run trained and evaluated, as text."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from .._pipeline.accounting.sample import Sample

STEP = "Step that trained them, or whose weights were evaluated; by default the last one of either."

COUNT = typer.Option(min=0, help="Show so many of these; with neither option, all of both.")


def samples(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    *,
    best: Annotated[int | None, COUNT] = None,
    worst: Annotated[int | None, COUNT] = None,
    step: Annotated[int | None, typer.Option(help=STEP)] = None,
) -> None:
    """Print the best and the worst samples of a step and of its evaluation, by reward.

    Only reads, while the run goes on or afterwards.
    """
    from rich.console import Console  # noqa: PLC0415 (not needed for --help)

    from .._pipeline.trackers.written_samples import written_samples  # noqa: PLC0415 (as above)

    console = Console(highlight=False, markup=False)
    wanted = {"best": best, "worst": worst}
    some = best is not None or worst is not None
    for sample in written_samples(run, step):
        bound = wanted[sample.kind]
        if sample.rank <= (bound or 0) or not some:
            _print(console, sample)


def _print(console: Console, sample: Sample) -> None:
    from rich.text import Text  # noqa: PLC0415 (as above)

    from .._pipeline.util.readable import Readable  # noqa: PLC0415 (as above)
    from .._pipeline.view.sample_text import heading, place  # noqa: PLC0415 (as above)

    style = "bold green" if sample.kind == "best" else "bold red"
    prompt, completion = (indent(text, "  ") for text in (sample.prompt, sample.completion))
    text = Text.assemble(
        (f"{place(sample)}, {sample.kind} {sample.rank}", style),
        f": {heading(sample)}\n",
        (f"{sample.env}/{sample.instance_id}, completion {sample.repetition}, ", "dim"),
        (f"weights of step {sample.policy_version}\n", "dim"),
        ("prompt\n", "bold"),
        f"{prompt}\n",
        ("completion\n", "bold"),
        f"{completion}\n",
        *((("right answer\n", "bold"), f"{indent(sample.answer, '  ')}\n") if sample.answer else ()),
    )
    console.print(Readable(text), soft_wrap=True)
