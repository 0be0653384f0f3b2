"""A stage in the wrong place of a chain is refused there, with the line to write instead."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.pipeline.flow_stages import Collect, Count, Double, Groups, Pack, Train

from penstock import Batcher, SinkTrainer, TrainBatch, here, processes, source
from penstock.errors import InvalidPipeline
from penstock.testing import drive_source


class Trainer:
    def step(self, batch: TrainBatch) -> dict[str, float]:
        raise AssertionError(batch)


class UntypedSource:
    async def run(self, outbox): ...  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201


class UntypedSink:
    async def run(self, inbox): ...  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201


class Endless:
    async def run(self, *ends: Any) -> None: ...


class Plain:
    async def run(self) -> None: ...


FLOW: Any = source(Groups(1))
"""Untyped, as in the script of a user without a type checker."""

BEGIN: Any = source


@pytest.mark.parametrize("on", [here, processes, 4, "here", None, np.int64(4), True])
def test_an_invalid_placement_is_refused(on: object) -> None:
    for place in (partial(BEGIN, Groups(1)), partial(FLOW.then, Pack())):
        with pytest.raises(
            InvalidPipeline,
            match=r"on: expected here\(\), .*, ray\(workers=n\) or joining\(expected=n\), got .*: write on=",
        ):
            place(on=on)


@pytest.mark.parametrize(
    ("on", "message"),
    [
        (here, "got here: write on=here()"),
        (processes, "got processes: write on=processes(4)"),
        (8, "got 8: write on=processes(8)"),
    ],
)
def test_a_placement_that_was_nearly_right_is_corrected(on: object, message: str) -> None:
    with pytest.raises(InvalidPipeline) as refused:
        FLOW.then(Pack(), on=on)

    assert str(refused.value).endswith(message)


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (lambda: BEGIN(Groups), "source(…): expected a source, got the class Groups: write source(Groups(…))"),
        (lambda: FLOW.then(Batcher), ".then(…): expected a stage, got the class Batcher: write .then(Batcher(…))"),
        (lambda: FLOW.sink(SinkTrainer), ".sink(…): expected a sink, got the class SinkTrainer: write .sink(SinkTr"),
        (
            lambda: FLOW.then(SinkTrainer(Trainer())),
            "then(…): expected a stage, got the sink SinkTrainer, whose run takes (inbox): write .sink(SinkTrainer(…))",
        ),
        (
            lambda: FLOW.sink(Batcher(64)),
            "expected a sink, got the stage Batcher, whose run takes (inbox, outbox): write .then(Batcher(…)).sink(…)",
        ),
        (lambda: FLOW.then(Groups(1)), "got the source Groups, whose run takes (outbox): write source(Groups(…)) at"),
        (lambda: FLOW.sink(FLOW), "got the source Flow, whose run takes (outbox): write source(Flow(…)) at the begin"),
        (lambda: BEGIN(Double()), "got the stage Double, whose run takes (inbox, outbox): write source(…).then(Doubl"),
        (lambda: BEGIN(Collect()), "got the sink Collect, whose run takes (inbox): write source(…).sink(Collect(…))"),
        (lambda: FLOW.then(UntypedSink()), "got the sink UntypedSink, whose run takes (inbox): write .sink("),
        (lambda: FLOW.then(UntypedSource()), "got the source UntypedSource, whose run takes (outbox): write source("),
        (lambda: FLOW.then(Plain()), "write `async def run(self, inbox, outbox)`"),
    ],
)
def test_another_object_than_a_stage_is_refused_with_the_line_to_write(put: Any, message: str) -> None:
    with pytest.raises(InvalidPipeline) as refused:
        put()

    assert message in str(refused.value)


def test_a_stage_that_takes_any_number_of_ends_fits_everywhere() -> None:
    source(Endless()).then(Endless()).sink(Endless())


@pytest.mark.parametrize("options", [{}, {"folder": "runs/1"}])
async def test_a_chain_without_a_sink_is_not_run(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidPipeline, match=r"Groups: expected a pipeline, .*: write \.sink\(SinkTrainer"):
        await FLOW.run(**options)


async def test_a_chain_without_a_sink_is_a_source() -> None:
    assert await drive_source(source(Count(2)).then(Double())) == [0, 2]
    assert source(Groups(1)).then(Pack()).sink(Train()) is not None
