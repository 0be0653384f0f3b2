"""The texts of each evaluation are written, printed and shown beside those of training."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from structlog.testing import capture_logs
from tests.commands.waiting_run import printed
from tests.fake_policy import Letters
from tests.stages.sampling.runs import SAMPLED, Lines, Sums, evaluation, pipeline

from penstock import Pipeline, StopReason, here, processes
from penstock.accounting import Metrics
from penstock.trackers import Jsonl, Sample, Samples

SAMPLES = Samples(every=100, count=1)


async def written(run: Pipeline, folder: Path, **options: Any) -> list[Sample]:
    """Run; return the lines of `samples.jsonl`."""
    await run.run(trackers=[Jsonl(folder)], **options)
    return [msgspec.json.decode(line, type=Sample) for line in (folder / "samples.jsonl").read_bytes().splitlines()]


def evaluated(samples: Sequence[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.evaluated is not None]


@pytest.mark.parametrize(("on", "max_lag"), [(here(), 0), (here(), 1), (processes(2), 0), (processes(2), 1)])
async def test_each_evaluation_has_its_best_and_its_worst_whoever_did_a_part_of_it(
    tmp_path: Path, on: Any, max_lag: int
) -> None:
    lines = Lines()
    run = pipeline(evaluation(), on=on, max_lag=max_lag, samples=SAMPLES)

    samples = await written(run, tmp_path, metrics=Metrics(lines))

    found = [
        (each.evaluated, each.set, each.kind, each.prompt, each.completion, each.reward) for each in evaluated(samples)
    ]
    assert found == [
        row
        for step in lines.evaluations
        for row in (
            (step, "sums", "best", "100+1=", "101\0", 1.0),
            (step, "sums", "worst", "102+1=", "104\0", 0.0),
        )
    ]
    assert [each.step for each in samples if each.evaluated is None] == [1, 1]


async def test_a_sample_of_an_evaluation_has_the_numbers_of_its_completion(tmp_path: Path) -> None:
    samples = evaluated(await written(pipeline(evaluation(**SAMPLED), samples=SAMPLES), tmp_path))

    worst = samples[1]
    assert (worst.step, worst.evaluated, worst.kind, worst.rank) == (1, 0, "worst", 1)
    assert (worst.env, worst.instance_id, worst.repetition) == ("Sums", "2", 0)
    assert (worst.completion_tokens, worst.stop_reason) == (4, StopReason.STOP.name.lower())
    assert (worst.advantage, worst.policy_version) == (None, 0)


async def test_of_several_sets_no_more_are_chosen_and_those_of_equal_reward_are_of_many_prompts_and_sets(
    tmp_path: Path,
) -> None:
    sets = {"easy": partial(Sums, 100, 2), "hard": partial(Sums, 103, 2)}

    samples = await written(pipeline(evaluation(sets=sets, **SAMPLED), samples=Samples(every=100, count=4)), tmp_path)

    best = [each for each in evaluated(samples) if each.evaluated == 2 and each.kind == "best"]
    assert [(each.set, each.instance_id) for each in best] == [
        ("easy", "0"),
        ("hard", "0"),
        ("easy", "1"),
        ("hard", "1"),
    ]
    assert len(evaluated(samples)) == 3 * 2 * 4


async def test_lines_show_the_best_and_the_worst_of_each_evaluation_up_to_the_last(
    capsys: pytest.CaptureFixture[str],
) -> None:
    await pipeline(evaluation(), samples=SAMPLES).run(view="lines")

    shown = capsys.readouterr().err
    assert "best of evaluation of step 4, sums: reward 1, 4 tokens, stop; prompt: 100+1=; completion: 101" in shown
    assert "worst of evaluation of step 4, sums: reward 0, 4 tokens, stop; prompt: 102+1=; completion: 104" in shown


def test_the_command_prints_those_of_the_last_evaluation_or_of_a_step(tmp_path: Path) -> None:
    anyio.run(written, pipeline(evaluation(), samples=SAMPLES), tmp_path)

    last, of_2 = printed("samples", tmp_path), printed("samples", tmp_path, "--step", 2, "--worst", 1)

    headings = [line.rpartition(": ")[0] for line in last.splitlines() if line.startswith(("step", "evaluation"))]
    assert headings == [
        "step 1, best 1", "step 1, worst 1", "evaluation of step 4, sums, best 1", "evaluation of step 4, sums, worst 1"
    ]  # fmt: skip
    assert "evaluation of step 2, sums, worst 1: reward 0" in of_2
    assert "best" not in of_2
    assert "  102+1=\ncompletion\n  104" in of_2


async def test_without_samples_of_training_there_are_none_of_evaluations(tmp_path: Path) -> None:
    await pipeline(evaluation()).run(trackers=[Jsonl(tmp_path)])

    assert not (tmp_path / "samples.jsonl").exists()


class Broken(Letters):
    """Cannot decode its end token, which rewards never see."""

    def decode(self, ids: Sequence[int]) -> str:
        if self.eos_id in ids:
            raise KeyError(self.eos_id)
        return super().decode(ids)


async def test_a_tokenizer_that_cannot_decode_an_evaluation_ends_none(tmp_path: Path) -> None:
    lines = Lines()
    run = pipeline(evaluation(), tokenizer=Broken(), samples=SAMPLES)

    with capture_logs() as logs:
        await run.run(trackers=[Jsonl(tmp_path)], metrics=Metrics(lines))

    assert list(lines.evaluations) == [0, 2, 4]
    assert not (tmp_path / "samples.jsonl").exists()
    assert [entry["step"] for entry in logs if entry["event"] == "samples_failed"] == [0, 1, 2, 4]


async def test_texts_are_cut_to_what_a_message_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock._stages.sampling.evaluated_samples.LONGEST", 60)

    samples = await written(pipeline(evaluation(), samples=SAMPLES), tmp_path)

    assert {(each.prompt, each.completion) for each in evaluated(samples)} == {("100…", "101\0"), ("102…", "104\0")}
