"""A recorded run is trained again from its batches: to the same weights, or with another loss."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.command_line import ran
from tests.models_hf.killing_loss import KILL_AT_CALL
from tests.models_hf.questions import Questions, Ran, write_questions

from penstock.errors import FileDamaged, NoRecording, RunDiffers
from penstock.runs import load_replay_config, train

ModelFolder = Callable[[str], Path]

LONG = pytest.mark.long

KINDS = {
    "no lag": [],
    "everything": [
        "algorithm.max_lag=2",
        "algorithm.updates=2",
        "algorithm.optimizer.micro_batch_tokens=40",
        "algorithm.kl=0.1",
        "algorithm.adaptive_kl={target: 0.01, horizon: 50}",
        "algorithm.reference={every: 2, share: 0.5}",
        "algorithm.mask_truncated=true",
    ],
    "critic": ["algorithm.advantages=gae", "critic={warmup_steps: 1, learning_rate: 0.01}", "algorithm.gamma=0.9"],
    "adapters": ["model.lora={rank: 2, dropout: 0.2}", "algorithm.drop_zero_variance=true"],
}
"""Values of a run, by name."""


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory, model_folder: ModelFolder) -> Iterator[Questions]:
    """Return questions, in the current folder."""
    with chdir(tmp_path_factory.mktemp("questions")):
        yield write_questions(Path.cwd(), model_folder("qwen2"))


@pytest.fixture(scope="module")
def recorded(questions: Questions) -> Ran:
    """Return a run of four steps that has recorded them."""
    return questions.train("record=true", "folder=recorded")


def replayed(run: Path, *overrides: str) -> Ran:
    """Replay `run` in a folder of its own."""
    config = load_replay_config(run, overrides)
    return Ran(Path(config.folder), anyio.run(partial(train, view=None), config), "", 0)


def weights_of(run: Path) -> dict[str, bytes]:
    """Return the weights and moments in the last checkpoint of a run, with those of a critic, as bytes."""
    (newest,) = sorted((run / "checkpoints").glob("step-*"))[-1:]
    return {path.name: path.read_bytes() for path in newest.iterdir() if path.suffix in {".safetensors", ".tensors"}}


def learned(line: dict[str, Any]) -> list[float]:
    """Return metrics of a step that the trainer decides."""
    return [
        line[key] for key in ("step", "loss", "reward", "rewards/shorter", "kl", "grad_norm", "lr", "staleness/mean")
    ]


@pytest.mark.parametrize(
    "kind", ["no lag", "everything", *(pytest.param(kind, marks=LONG) for kind in list(KINDS)[2:])]
)
def test_a_replay_trains_the_weights_of_the_recorded_run_bit_for_bit(kind: str, questions: Questions) -> None:
    run = questions.train("record=true", f"folder={kind.replace(' ', '_')}", *KINDS[kind])

    again = replayed(run.folder)

    assert again.folder.name == f"{run.folder.name}-replay"
    assert again.summary.steps == run.summary.steps == 4
    assert weights_of(again.folder) == weights_of(run.folder)
    assert [learned(line) for line in again.steps()] == [learned(line) for line in run.steps()]
    assert again.lines("samples.jsonl")
    assert not (again.folder / "recording").exists()


def test_a_replay_needs_neither_data_nor_reward_and_another_loss_has_other_weights(
    recorded: Ran, questions: Questions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, questions.module, None)
    Path("train.jsonl").rename("elsewhere.jsonl")
    try:
        status, printed = ran("replay", recorded.folder, "algorithm.loss=reinforce", "--folder", "other")
    finally:
        Path("elsewhere.jsonl").rename("train.jsonl")

    assert status == 0, printed
    assert "4 steps in" in printed
    assert weights_of(Path("other")) != weights_of(recorded.folder)


def test_a_replay_that_ended_after_a_step_goes_on_from_there(recorded: Ran) -> None:
    first = replayed(recorded.folder, "replay.last=3", "folder=step")
    assert first.summary.steps == 3

    whole = replayed(recorded.folder, "folder=step")

    assert [line["step"] for line in whole.steps()] == [1, 2, 3, 4]
    assert weights_of(whole.folder) == weights_of(recorded.folder)
    with pytest.raises(RunDiffers, match=r"algorithm\.loss: 'ppo' → 'gspo': take another folder"):
        replayed(recorded.folder, "folder=step", "algorithm.loss=gspo")
    with pytest.raises(NoRecording, match=r"expected the batches of 9 steps in .*/recording, got those of 4"):
        replayed(recorded.folder, "folder=step", "replay.last=9")


REFUSED = {
    "data.max_prompt_tokens=9": "config: data.max_prompt_tokens: expected the value of the recorded run",
    "reward.clip=[0, 1]": "config: reward.clip: expected the value of the recorded run",
    "environment={make: 'm:e'}": "config: data: expected neither path, sets nor evaluation beside an environment",
    "algorithm.advantages=rloo": "config: algorithm.advantages: expected the value of the recorded run, for another "
    "one has no effect in a replay, got 'rloo': remove it, or train a run of its own",
    "algorithm.group_size=2": "config: algorithm.group_size: expected the value of the recorded run",
    "algorithm.max_lag=3": "config: algorithm.max_lag: expected the value of the recorded run",
    "sampling.temperature=0.5": "config: sampling.temperature: expected the value of the recorded run",
    "placement.samplers=2": "config: placement.samplers: expected the value of the recorded run",
    "evaluation={every: 2}": "config: evaluation: expected the value of the recorded run",
    "record=true": "config: record: expected false in a replay",
    "algorithm.loss=sft": "config: algorithm.loss: expected one of sampled completions in a replay, got sft",
    "folder=recorded": "config: folder: expected one of its own for a replay, got that of the run, ",
}


@pytest.mark.parametrize("override", REFUSED)
def test_a_key_that_decided_what_was_sampled_is_refused_in_one_sentence(override: str, recorded: Ran) -> None:
    with chdir(recorded.folder.parent):
        status, printed = ran("replay", "recorded", override)

    assert status == 1
    assert f"penstock: {REFUSED[override]}" in printed
    assert printed.count("\n") == 1


def test_a_folder_without_a_recording_is_refused_in_one_sentence(recorded: Ran, tmp_path: Path) -> None:
    part = shutil.copytree(recorded.folder, tmp_path / "part", symlinks=True)
    (part / "recording/00000001.batch-2").unlink()
    said = {
        tmp_path / "no run": "expected the folder of a recorded run, got .*/no run without config.json",
        part: "expected batches of a run from its first step on in .*/recording, got those from step 2 on: train that",
    }
    for folder, sentence in said.items():
        with pytest.raises(NoRecording, match=sentence):
            replayed(folder)

    config = part / "config.json"
    config.write_text(config.read_text().replace('"record": true', '"record": false'))
    with pytest.raises(FileDamaged, match=r"config\.json: expected to read back what was written"):
        replayed(part)


def test_a_run_that_recorded_only_some_parts_is_refused(questions: Questions, recorded: Ran) -> None:
    run = shutil.copytree(recorded.folder, "parts", symlinks=True)
    more = ["folder=parts", "algorithm.steps=5", "algorithm.optimizer.lr=0.02"]
    with pytest.raises(RunDiffers, match="record: True → False"):
        questions.train(*more)

    questions.train("record=true", *more)
    again, printed = ran("replay", "parts", "folder=of_parts")
    assert again == 0
    assert (
        "the run was trained until step 4 with another algorithm.optimizer.lr: 0.01 → 0.02; the replay has" in printed
    )
    assert "5 steps in" in printed

    questions.train("allow_changes=true", "folder=parts", "algorithm.steps=6", "algorithm.optimizer.lr=0.02")
    with pytest.raises(
        NoRecording, match=r"got one that kept no batches from step 6 on: train it again with record=true"
    ):
        load_replay_config(run)


def test_the_model_may_have_moved_but_another_one_is_refused_by_name(
    recorded: Ran, questions: Questions, model_folder: ModelFolder
) -> None:
    moved = shutil.copytree(questions.values["model"]["path"], "moved")

    again = replayed(recorded.folder, f"model.path={moved}", "folder=of_moved", "replay.last=1")

    assert again.summary.steps == 1
    other = model_folder("llama")
    with pytest.raises(RunDiffers, match=r"expected the model that the run in .* began with, .*: model\.base"):
        replayed(recorded.folder, f"model.path={other}", "folder=of_other")


def killed(call: int, *arguments: str) -> None:
    """Run a command that is killed in a call of its loss."""
    command = [sys.executable, "-m", "penstock", *arguments]
    environment = os.environ | {KILL_AT_CALL: str(call), "PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL


@LONG
def test_a_recording_and_a_replay_that_were_killed_in_a_step_and_resumed_end_with_the_weights_of_whole_ones(
    questions: Questions,
) -> None:
    loss = "algorithm.loss=tests.models_hf.killing_loss:Killing"
    values = ["record=true", "algorithm.steps=5", loss]
    whole = questions.train("folder=whole", *values)
    (questions.folder / "config.yaml").write_text(str(questions.values | {"folder": "killed"}))

    killed(4, "run", "config.yaml", *values)
    run = questions.folder / "killed"
    steps = [f"{step:08d}.batch-2" for step in range(1, 6)]
    assert sorted(path.name for path in (run / "recording").iterdir()) == steps[:4]
    questions.train("folder=killed", *values)

    assert sorted(path.name for path in (run / "recording").iterdir()) == steps
    assert weights_of(run) == weights_of(whole.folder)
    killed(4, "replay", "killed", "--folder", "again")
    assert weights_of(replayed(run, "folder=again").folder) == weights_of(whole.folder)


@LONG
def test_ranks_replay_what_ranks_have_recorded(questions: Questions) -> None:
    (questions.folder / "config.yaml").write_text(str(questions.values | {"folder": "ranks"}))
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    for arguments in (["run", "config.yaml", "record=true", "placement.trainers=2"], ["replay", "ranks"]):
        subprocess.run([sys.executable, "-m", "penstock", *arguments], env=environment, check=True)

    assert weights_of(Path("ranks-replay")) == weights_of(Path("ranks"))
