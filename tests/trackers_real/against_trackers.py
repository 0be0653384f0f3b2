"""The programs of the trackers themselves: what a run writes is read back. `make test-trackers` runs this file."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import anyio
import anyio.to_thread
import pytest
from tests.pipeline.view.watched import STEPS, small_run

from penstock.errors import InvalidConfig
from penstock.trackers import MLflow, Prometheus, RunInfo, TensorBoard, Tracker, WandB

CONFIG = {"lr": 0.5, "model": {"path": "m", "lora": None}}


def events(folder: Path) -> Any:
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    return module.EventAccumulator(str(folder)).Reload()


async def test_tensorboard_reads_the_scalars_the_samples_and_the_hyper_parameters(tmp_path: Path) -> None:
    await small_run().run(trackers=[TensorBoard(tmp_path)], config=CONFIG)

    read = events(tmp_path)
    assert [(each.step, each.value) for each in read.Scalars("loss")] == [
        (step, pytest.approx(1 / step)) for step in range(1, STEPS + 1)
    ]
    assert {"reward", "accuracy", "response_length/mean", "perf/throughput"} <= set(read.Tags()["scalars"])
    (text,) = [each for each in read.Tensors("samples/best_1/text_summary") if each.step == STEPS]
    assert "completion" in text.tensor_proto.string_val[0].decode()
    plugins = importlib.import_module("tensorboard.plugins.hparams.plugin_data_pb2")
    data = plugins.HParamsPluginData.FromString(
        read.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    )
    hparams = data.session_start_info.hparams
    assert {name: hparams[name].number_value or hparams[name].string_value for name in hparams} == {
        "lr": 0.5,
        "model.path": "m",
        "model.lora": "None",
    }


def test_steps_that_a_continued_run_trains_again_are_shown_once(tmp_path: Path) -> None:
    for begin, last in ((0, 5), (3, 6)):
        tracker = TensorBoard()
        tracker.start(RunInfo(name="run", folder=tmp_path, step=begin))
        for step in range(begin + 1, last + 1):
            tracker.log({"loss": float(begin)}, step)
        tracker.close(True)

    read = events(tmp_path / "tensorboard")
    assert [(each.step, each.value) for each in read.Scalars("loss")] == [
        (1, 0.0),
        (2, 0.0),
        (3, 0.0),
        (4, 3.0),
        (5, 3.0),
        (6, 3.0),
    ]


def run_twice(make: Callable[[], Tracker], folder: Path) -> None:
    """Log five steps, and then, as a run that is continued from step 3, those from 4 to 6 by another tracker."""
    for begin, last in ((0, 5), (3, 6)):
        tracker = make()
        tracker.start(RunInfo(name="run", folder=folder, step=begin, config=CONFIG))
        for step in range(begin + 1, last + 1):
            tracker.log({"loss": float(begin), "eval/a/mean@1": 0.5, "perf/time_per_step": 1.0}, step)
        tracker.close(True)


def mlflow_run(folder: Path) -> tuple[Any, Any]:
    """Return MLflow's client, and the only run in its database."""
    client = importlib.import_module("mlflow.tracking").MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("penstock").experiment_id])
    return client, run


def test_mlflow_has_the_metrics_the_samples_and_the_hyper_parameters_in_the_folder_of_the_run(tmp_path: Path) -> None:
    anyio.run(partial(small_run().run, trackers=[MLflow(f"sqlite:///{tmp_path / 'mlflow.db'}")], config=CONFIG))

    client, run = mlflow_run(tmp_path)
    assert [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "loss")] == [
        (step, pytest.approx(1 / step)) for step in range(1, STEPS + 1)
    ]
    assert run.data.params == {"lr": "0.5", "model.path": "m", "model.lora": "None"}
    assert run.info.status == "FINISHED"
    assert sorted(file.name for file in tmp_path.rglob("*.jsonl")) == ["step-00000001.jsonl", "step-00000004.jsonl"]


def test_mlflow_shows_a_continued_run_as_one_with_each_step_once(tmp_path: Path) -> None:
    run_twice(MLflow, tmp_path)

    client, run = mlflow_run(tmp_path)
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(each.step, each.value) for each in history] == [*((step, 0.0) for step in range(1, 6)), (6, 3.0)]
    assert run.data.metrics["eval/a/mean_1"] == 0.5


TRACKIO = """
import json, sys
import trackio
from pathlib import Path
from tests.trackers_real.against_trackers import run_twice
from penstock.trackers import Trackio

run_twice(lambda: Trackio("test"), Path(sys.argv[1]))
from trackio.sqlite_storage import SQLiteStorage

(name,) = SQLiteStorage.get_runs("test")
found = [[each["step"], each["loss"], each["eval/a/mean@1"]] for each in SQLiteStorage.get_logs("test", name)]
print("found", json.dumps([found, trackio.Api().runs("test")[0].config["lr"]]))
"""


def test_trackio_has_a_continued_run_as_one_with_each_step_once(tmp_path: Path) -> None:
    done = subprocess.run(  # trackio reads TRACKIO_DIR when it is imported
        [sys.executable, "-c", TRACKIO, str(tmp_path)],
        env=os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio")},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    found, lr = json.loads(line.removeprefix("found "))
    assert found == [*([step, 0.0, 0.5] for step in range(1, 6)), [6, 3.0, 0.5]]
    assert lr == 0.5


def test_prometheus_scrapes_the_last_step_by_names_that_it_allows(tmp_path: Path) -> None:
    tracker = Prometheus(0)
    tracker.start(RunInfo(name="run", folder=tmp_path, step=3))
    tracker.log({"loss": 0.5, "eval/a b/mean@1": 0.25} | {f"m/{number}": 1.0 for number in range(2000)}, 4)

    with urlopen(tracker.url) as page:  # noqa: S310 (our own)
        read = importlib.import_module("prometheus_client.parser").text_string_to_metric_families(page.read().decode())
    values = {sample.name: sample.value for family in read for sample in family.samples}
    with pytest.raises(InvalidConfig, match="expected a free port"):
        Prometheus(int(tracker.url.split(":")[2].partition("/")[0]))
    tracker.close(True)
    tracker.close(True)

    assert values["penstock_step"] == 4
    assert (values["penstock_loss"], values["penstock_eval_a_b_mean_1"]) == (0.5, 0.25)
    assert len(values) == 1024
    assert tracker.url == ""


def records(file: Path) -> list[Any]:
    """Read the log that W&B's own program writes: blocks of 32 KiB, in LevelDB's format."""
    record, block = importlib.import_module("wandb.proto.wandb_internal_pb2").Record, 32_768
    data, at, parts, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in {1, 4}:  # whole, or the last part
            found.append(record.FromString(parts))
            parts = b""
    return found


async def test_wandb_writes_the_metrics_the_samples_and_the_hyper_parameters_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))

    await small_run().run(trackers=[WandB("penstock-test")], config=CONFIG)
    await anyio.to_thread.run_sync(importlib.import_module("wandb").teardown)  # its own program has ended, and written

    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    read = records(file)
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in each.history.item}
        for each in read
        if each.HasField("history")
    ]
    assert [(row["_step"], row["loss"]) for row in rows] == [
        (step, pytest.approx(1 / step)) for step in range(1, STEPS + 1)
    ]
    assert any("samples" in name for name in rows[-1])
    config = {
        item.key: json.loads(item.value_json)
        for each in read
        if each.HasField("run")
        for item in each.run.config.update
    }
    assert config["lr"] == 0.5
    assert config["model"] == {"path": "m", "lora": None}
    assert {each.run.project for each in read if each.HasField("run")} == {"penstock-test"}
    assert [each.exit.exit_code for each in read if each.HasField("exit")] == [0]
