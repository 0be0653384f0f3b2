"""A script that continues a run is compared with the folder: other data is refused, and what may change is printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fake_policy import FakePolicy, Letters
from tests.resumption.script_of_data import NEVER, Recorder, answered

from penstock import AdvantageNormalizer, Batcher, RewardBridge, SinkTrainer, SourceEnv, source
from penstock.data import Mixture, PromptDataset
from penstock.errors import RunDiffers
from penstock.rewards import RewardFunction

GROUP_SIZE, STEP_GROUPS = 2, 4

ROWS: list[dict[str, Any]] = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(20)]

OTHER = [{"prompt": f"{n}+2=", "answer": n + 2} for n in range(20)]


DATA = PromptDataset(ROWS)


async def run(
    folder: Path,
    steps: int,
    prompts: Callable[[], Any] = DATA,
    *,
    allow_changes: bool = False,
    config: dict[str, Any] | None = None,
    max_lag: int = 1,
    **options: Any,
) -> Recorder:
    """Run until `steps` steps are done, or continue the run, and return its trainer."""
    given: dict[str, Any] = {"group_size": GROUP_SIZE} | options
    recorder = Recorder(NEVER)
    pipeline = (
        source(SourceEnv(prompts, FakePolicy(), Letters(), **given), max_lag=max_lag)
        .then(RewardBridge(functions=[RewardFunction(answered, reads_text=False)]))
        .then(AdvantageNormalizer("none"))
        .then(Batcher(max_tokens=512, sequences=STEP_GROUPS * GROUP_SIZE))
        .sink(SinkTrainer(recorder, max_steps=steps))
    )
    await pipeline.run(folder=folder, config=config, allow_changes=allow_changes)
    return recorder


def contents(folder: Path) -> dict[Path, bytes]:
    """Return the files of a run, without its view, which shows each start."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "view.json"}


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("config*"))


# -- data --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "key"),
    [
        (PromptDataset(OTHER), "SourceEnv.data.digest"),
        (PromptDataset(ROWS[:-1]), "SourceEnv.data.rows: 20 → 19"),
        (PromptDataset([*ROWS, *OTHER[:3]]), "SourceEnv.data.rows: 20 → 23"),
        (PromptDataset(ROWS[::-1]), "SourceEnv.data.digest"),
        (PromptDataset(ROWS, seed=1), "SourceEnv.data.seed: 0 → 1"),
        (PromptDataset(ROWS, shuffle=False), "SourceEnv.data.shuffle: True → False"),
        (PromptDataset(ROWS, evaluation=3), "SourceEnv.data.evaluation: 0 → 3"),
    ],
    ids=["other", "fewer", "appended", "other order", "seed", "not shuffled", "split"],
)
async def test_other_data_is_refused_before_anything_is_trained(tmp_path: Path, now: PromptDataset, key: str) -> None:
    await run(tmp_path, 1)
    before = contents(tmp_path)

    with pytest.raises(RunDiffers, match=r"as it was until step 1, got other .*allow_changes=true") as refused:
        await run(tmp_path, 2, now)

    assert key in str(refused.value)
    assert contents(tmp_path) == before


async def test_other_weights_of_a_mixture_are_refused(tmp_path: Path) -> None:
    sets = [PromptDataset(ROWS, name="a"), PromptDataset(OTHER, name="b")]
    await run(tmp_path, 1, Mixture(sets, [1, 1]))

    with pytest.raises(RunDiffers, match=r"SourceEnv\.data\.places: \[1, 1\] → \[2, 1\]"):
        await run(tmp_path, 2, Mixture(sets, [2, 1]))
    with pytest.raises(RunDiffers, match=r"SourceEnv\.data\.kind: 'mixture' → 'rows'"):
        await run(tmp_path, 2, PromptDataset(ROWS), name="Mixture")
    await run(tmp_path, 2, Mixture(sets, [5, 5]))


async def test_the_same_rows_under_another_path_are_the_same_data(tmp_path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    for name in ("first.jsonl", "second.jsonl"):
        (tmp_path / name).write_text(lines)
    await run(tmp_path / "run", 1, PromptDataset(tmp_path / "first.jsonl"))

    resumed = await run(tmp_path / "run", 2, PromptDataset(tmp_path / "second.jsonl"))

    assert resumed.steps == 2


async def test_a_changed_byte_of_a_file_is_other_data(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    await run(tmp_path / "run", 1, PromptDataset(path))
    path.write_bytes(path.read_bytes().replace(b"19+1", b"19+2"))

    with pytest.raises(RunDiffers, match=r"SourceEnv\.data\.digest"):
        await run(tmp_path / "run", 2, PromptDataset(path))


@pytest.mark.parametrize("now", [OTHER, [*ROWS, *OTHER]], ids=["other", "appended"])
async def test_with_other_data_that_is_allowed_trained_numbers_stay_trained(tmp_path: Path, now: Any) -> None:
    before = await run(tmp_path, 2)

    resumed = await run(tmp_path, 5, PromptDataset(now), allow_changes=True)
    again = await run(tmp_path, 6, PromptDataset(now))  # a change is allowed once

    old, new = before.trained, again.trained[len(before.trained) :]
    assert resumed.trained[: len(old)] == old
    assert len({number for number, _, _ in again.trained}) == len(again.trained) == 6 * STEP_GROUPS
    prompts = PromptDataset(now)()
    assert all(prompts.prompt(number).meta["row"] == row for number, row, _ in new)


async def test_data_of_which_this_host_has_no_rows_is_not_compared(tmp_path: Path) -> None:
    here, elsewhere = (
        SourceEnv(DATA, FakePolicy()),
        SourceEnv(PromptDataset(tmp_path / "elsewhere.jsonl"), FakePolicy()),
    )

    assert here.facts().fixed.keys() - elsewhere.facts().fixed.keys() == {"data"}


# -- what may change ---------------------------------------------------------------------------------------------------


async def test_changed_options_are_printed_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await run(tmp_path, 1)

    resumed = await run(tmp_path, 2, max_lag=3)

    assert resumed.steps == 2
    assert "penstock: continued from step 1 with SourceEnv.max_lag: 1 → 3\n" in capsys.readouterr().err


async def test_the_configuration_of_each_part_is_kept_and_its_changes_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps, rate in ((1, 0.5), (2, 0.5), (3, 0.25), (4, 0.25)):
        await run(tmp_path, steps, config={"lr": rate, "name": "a"})

    assert files_in(tmp_path) == ["config.json", "config.step-00000002.json"]
    rates = [json.loads((tmp_path / name).read_bytes())["lr"] for name in files_in(tmp_path)]
    assert rates == [0.5, 0.25]
    assert [line for line in capsys.readouterr().err.splitlines() if "continued from" in line] == [
        "penstock: continued from step 2 with lr: 0.5 → 0.25"
    ]


async def test_a_part_of_which_every_step_is_trained_again_leaves_no_configuration(tmp_path: Path) -> None:
    class Fails(Recorder):
        def step(self, batch: Any) -> dict[str, float]:  # noqa: ARG002 (the protocol's)
            raise RuntimeError("out of memory")

    await run(tmp_path, 1, config={"lr": 1})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(f"{__name__}.Recorder", Fails)
        with pytest.raises(Exception, match="out of memory"):
            await run(tmp_path, 2, config={"lr": 2})
    assert files_in(tmp_path) == ["config.json", "config.step-00000001.json"]

    await run(tmp_path, 2, config={"lr": 1})

    assert files_in(tmp_path) == ["config.json"]


async def test_a_run_without_its_configuration_goes_on_and_is_compared_from_then_on(tmp_path: Path) -> None:
    await run(tmp_path, 1)
    (tmp_path / "config.json").unlink()

    await run(tmp_path, 2)

    with pytest.raises(RunDiffers):
        await run(tmp_path, 3, PromptDataset(OTHER))


async def test_a_source_that_is_no_data_set_is_compared_by_its_name_and_seed(tmp_path: Path) -> None:
    def prompts() -> Any:
        return PromptDataset(ROWS)()

    await run(tmp_path, 1, prompts)

    with pytest.raises(RunDiffers, match=r"SourceEnv\.seed: 0 → 1"):
        await run(tmp_path, 2, prompts, seed=1)
    with pytest.raises(RunDiffers, match=r"SourceEnv\.name: 'prompts' → 'partial'|SourceEnv\.name"):
        await run(tmp_path, 2, partial(PromptDataset, ROWS)())


async def test_values_that_json_cannot_hold_are_compared_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps in (1, 2):
        config = {"path": Path("a"), "rate": np.float32(0.5), "made": object(), "stages": steps}
        await run(tmp_path, steps, seed=np.int64(3), config=config)

    printed = [line for line in capsys.readouterr().err.splitlines() if "continued from" in line]
    assert printed == ["penstock: continued from step 1 with stages: 1 → 2"]
