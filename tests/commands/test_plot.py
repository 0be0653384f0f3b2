"""`penstock plot`: pictures of the main curves, of runs of any name."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from tests.command_line import ran
from tests.commands.written_run import write_lines, write_run


def plot(*arguments: object, status: int = 0) -> str:
    ended, printed = ran("plot", *arguments)
    assert ended == status, printed
    return printed


def texts(file: Path) -> set[str]:
    """Return the comments of an SVG, which are the texts that its paths draw."""
    builder = ET.TreeBuilder(insert_comments=True)
    parser = ET.XMLParser(target=builder)  # noqa: S314 (written here)
    root = ET.parse(file, parser).getroot()  # noqa: S314 (written here)
    return {str(each.text).strip() for each in root.iter() if callable(each.tag)}


def test_a_picture_is_written_beside_the_run_or_where_it_is_wanted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")

    printed = plot(run)
    plot(run, "--output", tmp_path / "curves.svg")

    assert printed == f"wrote {run / 'plot.png'}\n"
    assert (run / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert {"reward", "loss", "grad_norm", "entropy", "optimizer step", "nats"} <= texts(tmp_path / "curves.svg")


def test_several_runs_are_named_and_metrics_can_be_chosen(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two"))]

    plot(*runs, "--metrics", "mine/3", "--metrics", "loss", "--output", tmp_path / "curves.svg")

    shown = texts(tmp_path / "curves.svg")
    assert {"one", "two", "mine/3", "loss"} <= shown
    assert "reward" not in {text for text in shown if text not in {"one", "two"}}


def test_names_are_text_and_no_formulas(tmp_path: Path) -> None:
    run = write_run(tmp_path / "$\\frac{1}$")
    write_lines(run / "metrics.jsonl", [{"step": 30, "_$x^{": 1.0}])

    plot(run, write_run(tmp_path / "_two"), "--metrics", "_$x^{", "--output", tmp_path / "curves.svg")

    assert {"$\\frac{1}$", "_two", "_$x^{"} <= texts(tmp_path / "curves.svg")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--metrics", "nope"], 1, "penstock: expected metrics of these runs, got nope: they have reward, "),
        (["--output", "curves.pdf"], 2, "expected a name that ends in .png or .svg, got curves.pdf"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path: Path, arguments: list[str], status: int, message: str) -> None:
    assert message in plot(write_run(tmp_path / "run"), *arguments, status=status)


def test_a_run_without_metrics_has_no_picture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    assert plot(tmp_path, status=1).startswith("penstock: expected runs with metrics, got none: ")
