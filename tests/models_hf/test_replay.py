"""A recorded run is trained again from its batches: to the same weights, or with another loss."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator
from contextlib import chdir, redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.command_line import ran
from tests.models_hf.questions import Questions, Ran, equal, weights_in, write_questions

from penstock.errors import FileDamaged, InvalidConfig, NoRecording, PenstockError, RunDiffers
from penstock.runs import load_replay_config, train

ModelFolder = Callable[[str], Path]

KINDS = {
    "without lag": [],
    "with lag": ["algorithm.max_lag=2"],
    "two updates": ["algorithm.updates=2", "algorithm.optimizer.micro_batch_tokens=40"],
    "a moving reference and an adaptive weight": [
        "algorithm.kl=0.1",
        "algorithm.adaptive_kl={target: 0.01, horizon: 50}",
        "algorithm.reference={every: 2, share: 0.5}",
    ],
    "a critic": ["algorithm.advantages=gae", "critic={warmup_steps: 1, learning_rate: 0.01}", "algorithm.gamma=0.9"],
    "adapters with dropout": ["model.lora={rank: 2, dropout: 0.2}", "algorithm.drop_zero_variance=true"],
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
    printed = io.StringIO()
    with redirect_stderr(printed):
        config = load_replay_config(run, overrides)
        summary = anyio.run(partial(train, view="lines"), config)
    return Ran(Path(config.folder), summary, printed.getvalue(), 0)


def files_of(run: Path) -> dict[str, bytes]:
    """Return the weights in the last checkpoint of a run, with those of a critic, as bytes."""
    (newest,) = sorted((run / "checkpoints").glob("step-*"))[-1:]
    return {path.name: path.read_bytes() for path in newest.glob("*.safetensors")} | {
        path.name: path.read_bytes() for path in newest.glob("*.tensors")
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_trains_the_weights_of_the_recorded_run_bit_for_bit(kind: str, questions: Questions) -> None:
    name = kind.replace(" ", "_")
    run = questions.train("record=true", f"folder={name}", *KINDS[kind])

    again = replayed(run.folder)

    assert again.folder.name == f"{name}-replay"
    assert again.summary.steps == run.summary.steps == 4
    assert files_of(again.folder) == files_of(run.folder)
    assert [learned(line) for line in again.steps()] == [learned(line) for line in run.steps()]


def learned(line: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a step that neither a clock nor a sampler decides."""
    groups = ("timing_s/", "perf/", "eval/", "rollout/", "batch/", "queue/", "engine/", "lag/")
    return {key: value for key, value in line.items() if not key.startswith(groups)}
