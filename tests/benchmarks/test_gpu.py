"""`python -m benchmarks.gpu` on a CPU, with models that take no time."""

from __future__ import annotations

import json
from functools import partial
from importlib.util import find_spec
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu.__main__ import main, measure, show
from benchmarks.gpu.cases import CASES, Case, Load
from benchmarks.gpu.devices import SHEETS, Device, Kernel, Sheet
from benchmarks.gpu.golden import measure_golden_run
from benchmarks.gpu.parts import Part, Result, Skipped, run_parts
from benchmarks.gpu.peer import measure_trl
from benchmarks.gpu.serving import measure_publication, measure_sampling
from benchmarks.gpu.step import flops, grouped, measure_step
from benchmarks.shapes import make_module
from rich.console import Console
from tests.failsafe import FAILSAFE_S
from torch.utils.flop_counter import FlopCounterMode

from penstock import TrainBatch

CPU = Device.of("cpu")

SMALL = Load(256, shortest=8, longest=16, rows=3, prompt=4, completion=5, repeats=2, golden_steps=1)

TINY = CASES["tiny"]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Sheet:
    """Return the data sheet that the processor has in the test."""
    sheet = Sheet(bfloat16_flops=1e15, bytes_per_s=1e15)
    monkeypatch.setitem(SHEETS, "cpu", sheet)
    return sheet


def printed(results: list[Result]) -> str:
    text = StringIO()
    show(CPU, results, Console(width=132, file=text))
    return text.getvalue()


# -- a step ------------------------------------------------------------------------------------------------------------


def counted(sequences: list[list[int]], folder: Path) -> float:
    """Return the operations that torch counts for `sequences`, one after the other, with half of those of attention."""
    module = make_module("tiny", folder, "cpu", torch.float32)
    module.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        for tokens in sequences:
            logits = module(torch.tensor([tokens]), logits_to_keep=len(tokens) - 1).logits
            torch.autograd.backward(logits.sum())
    by_name = {str(name): float(count) for name, count in counter.get_flop_counts()["Global"].items()}
    pairs = by_name.pop("aten.bmm")
    return sum(by_name.values()) + pairs / 2


def sequences_of(batch: TrainBatch) -> list[list[int]]:
    ends = batch.cu_seqlens.tolist()
    return [batch.tokens[first:last].tolist() for first, last in pairwise(ends)]


def test_the_operations_of_a_step_are_those_that_torch_counts(tmp_path: Path) -> None:
    batch = SMALL.batch(TINY)

    with TINY.model(CPU) as model:
        assert flops(model, batch) == pytest.approx(counted(sequences_of(batch), tmp_path), rel=1e-3)


def test_weights_that_do_not_train_have_no_gradient_to_count() -> None:
    batch = SMALL.batch(TINY)

    with TINY.model(CPU) as whole, Case("tiny", rank=4).model(CPU) as adapted:
        assert 4 / 6 < flops(adapted, batch) / flops(whole, batch) < 0.8


@pytest.mark.parametrize("case", ["tiny", "tiny-adapters"])
def test_a_step_has_its_rate_and_kernels_of_every_group(case: str) -> None:
    found = measure_step(CASES[case], SMALL, CPU)

    assert found["tokens"] == SMALL.batch(CASES[case]).tokens.size
    assert found["tokens_per_s"] > 0
    assert len(found["step_s"]) == SMALL.repeats
    assert all(group["count"] > 0 and group["ms"] > 0 for group in found["kernels"].values())
    assert found["longest"][0]["ms"] >= found["longest"][-1]["ms"] > 0
    assert found["timing_s/backward"] > 0


def test_a_kernel_belongs_to_the_group_of_a_range_around_it() -> None:
    ranges = {
        "head": ("aten::mm", "ByTilesBackward"),
        "attention": ("torch_attn::_varlen_attn_backward",),
        "optimizer": ("aten::_fused_adamw_", "Optimizer.step#AdamW.step"),
        "rest": ("aten::mm", "aten::linear"),
    }

    found = grouped([Kernel("kernel", 2.0, each) for each in ranges.values()])

    assert found == {name: {"count": 1, "ms": 2.0} for name in ranges}


# -- shares ------------------------------------------------------------------------------------------------------------


def test_the_share_of_a_step_is_that_of_the_peak_of_a_known_device(known: Sheet) -> None:
    found = measure_step(TINY, SMALL, CPU)

    rate = found["flops"] * found["tokens_per_s"] / found["tokens"]
    assert found["share"] == pytest.approx(rate / known.bfloat16_flops)
    assert f"{found['share']:.3f}" in printed([Result("step tiny", "measured", "", 1.0, found)])


@pytest.mark.parametrize("measured", [measure_step, measure_sampling])
def test_the_share_of_an_unknown_device_is_unknown(measured: Any) -> None:
    found = measured(TINY, SMALL, CPU)

    assert found["share"] is None
    assert "unknown" in printed([Result("a part", "measured", "", 1.0, found)])


# -- samplers ----------------------------------------------------------------------------------------------------------


def test_sampling_counts_the_completions_of_all_rows(known: Sheet) -> None:
    found = measure_sampling(TINY, SMALL, CPU)

    assert found["tokens"] == 15
    assert len(found["batch_s"]) == 2
    assert 0 < found["share"] < 1
    assert known == CPU.sheet


@pytest.mark.parametrize("case", ["tiny", "tiny-adapters"])
def test_a_publication_is_of_all_tensors_and_to_the_host_where_there_is_no_gpu(case: str) -> None:
    found = measure_publication(CASES[case], SMALL, CPU)

    width = 4 if case == "tiny" else 2
    with TINY.model(CPU) as model:
        assert found["gib"] * 2**30 == width * sum(each.numel() for each in model.parameters())
    assert list(found["publish_s"]) == ["host"]
    assert len(found["publish_s"]["host"]) == 2


def test_a_golden_run_without_time_is_left_out() -> None:
    with pytest.raises(Skipped, match="time"):
        measure_golden_run(SMALL, CPU, timeout_s=0.0)


def test_a_golden_run_that_fails_has_what_it_said_last() -> None:
    with pytest.raises(RuntimeError, match=r"penstock run: .*algorithm\.steps"):
        measure_golden_run(SMALL._replace(golden_steps=-1), CPU, timeout_s=FAILSAFE_S)


@pytest.mark.skipif(find_spec("trl") is not None, reason="TRL is installed")
def test_without_trl_its_part_is_left_out_by_name() -> None:
    with pytest.raises(Skipped, match="TRL is not installed"):
        measure_trl(TINY, SMALL, CPU)


# -- parts -------------------------------------------------------------------------------------------------------------


def test_a_part_begins_only_before_the_time_is_over() -> None:
    now = 0.0

    def taking(seconds: float, left: float) -> dict[str, Any]:
        nonlocal now
        now += seconds
        return {"left": left}

    parts = [Part(f"{seconds}", partial(taking, seconds)) for seconds in (3, 4, 5, 6)]

    results = run_parts(parts, 7, lambda _: None, clock=lambda: now)

    assert [each.numbers for each in results] == [{"left": 7}, {"left": 4}, {}, {}]
    assert [(each.state, each.reason) for each in results[2:]] == [("left out", "time")] * 2


def test_a_part_that_fails_ends_no_other_and_all_are_reported() -> None:
    reports = []

    def fails(_: float) -> dict[str, Any]:
        raise RuntimeError("CUDA out of memory\nand more")

    def is_skipped(_: float) -> dict[str, Any]:
        raise Skipped("no such device")

    parts = [Part("first", fails), Part("second", is_skipped), Part("third", lambda _: {"tokens_per_s": 1.0})]
    run_parts(parts, 7, lambda results: reports.append([*results]))

    assert [len(each) for each in reports] == [1, 2, 3]
    assert [each[:3] for each in reports[-1]] == [
        ("first", "failed", "RuntimeError: CUDA out of memory"),
        ("second", "left out", "no such device"),
        ("third", "measured", ""),
    ]


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_table_and_the_file_name_each_part_that_was_left_out(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"

    results = measure(CPU, ["tiny"], SMALL, path, begin_within_s=0.0)

    written = json.loads(path.read_text())
    names = ["step tiny", "sampling tiny", "publication tiny", "golden run", "TRL tiny"]
    assert [each["part"] for each in written["parts"]] == names == [each.part for each in results]
    assert written["about"]["device"] == "cpu"
    assert written["load"]["longest"] == 16
    assert path.with_suffix(".txt").read_text().count("left out: time") == 5


def test_the_ratio_to_trl_is_that_of_the_same_model() -> None:
    step: dict[str, Any] = {"share": None, "step_s": [1.0]}
    of_trl = Result("TRL tiny", "measured", "", 1.0, {"tokens_per_s": 80.0, "step_s": [1.0], "sequences": 8})

    text = printed([Result("step tiny", "measured", "", 1.0, step | {"tokens_per_s": 100.0}), of_trl])

    assert "1.25" in text
    assert "8 sequences at once" in text


@pytest.fixture
def small_arguments(tmp_path: Path) -> list[str]:
    """Return the arguments of the smallest measurement, on a CPU."""
    sizes = SMALL._asdict() | {"device": "cpu", "cases": "tiny", "json": tmp_path / "gpu.json"}
    return [text for name, value in sizes.items() for text in (f"--{name.replace('_', '-')}", str(value))]


@pytest.mark.long
def test_the_command_measures_every_part_and_ends_well(small_arguments: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(small_arguments)

    parts = {each["part"]: each for each in json.loads((tmp_path / "gpu.json").read_text())["parts"]}
    assert not ended.value.code
    assert {name for name, each in parts.items() if each["state"] == "measured"} >= {
        "step tiny",
        "sampling tiny",
        "publication tiny",
        "golden run",
    }
    assert len(parts["golden run"]["numbers"]["rewards"]) == 1
