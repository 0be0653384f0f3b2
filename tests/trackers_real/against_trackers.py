"""TensorBoard and W&B themselves: what a run writes is read back. `make test-trackers` runs this file."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from tests.pipeline.view.watched import STEPS, small_run

from penstock.trackers import RunInfo, TensorBoard, WandB

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
