"""Batches reach prime-rl's trainer whole and once, and count as trained when its weights are there."""

from __future__ import annotations

import socket
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
from tests.failsafe import FAILSAFE_S
from tests.prime_rl.outside_trainer import FIELDS, OutsideTrainer, Received, write_weights

from penstock import SinkTrainer, TrainBatch
from penstock.errors import InvalidConfig, InvalidRecord, PeerLost, StepsOfAnotherRun, TrainerSilent, WeightsDamaged
from penstock.integrations.prime_rl import PrimeRLSink, PrimeRLTrainer
from penstock.testing import batch, drive_sink, group

LENGTHS = [5, 9, 3, 7, 2, 8]


def scored(lengths: list[int] | None = None, named: str = "", **columns: Any) -> TrainBatch:
    """Return a batch of one group a length, with the columns that prime-rl needs."""
    numbers = np.random.default_rng(0)
    groups = [
        group(
            completion_lengths=[length],
            env=f"env{place % 2}",
            instance_id=f"{named}{place}",
            advantages=numbers.normal(size=length + 2).astype(np.float32),
            tokens=numbers.integers(0, 26, length + 2).astype(np.int32),
            behavior_logprobs=-numbers.random(length + 2).astype(np.float32),
            seed=place,
            **columns,
        )
        for place, length in enumerate(lengths or LENGTHS)
    ]
    return TrainBatch.pack(groups)


def sequences_of(received: list[list[Received]]) -> list[dict[str, Any]]:
    """Return the sequences in the micro-batches of all ranks in which a token trains."""
    found = []
    for part in (part for rank in received for part in rank):
        start = 0
        for length in part["sequence_lengths"]:
            columns = {
                name: part[name][start : start + length] for name in FIELDS[:10] if "len" not in name and part.get(name)
            }
            start += length
            if any(columns["loss_mask"]):
                found.append(columns)
        assert start == len(part["input_ids"])
    return found


def sequences(batch: TrainBatch) -> list[dict[str, Any]]:
    """Return the sequences of a batch in prime-rl's form."""
    assert batch.advantages is not None
    assert batch.behavior_logprobs is not None
    found = []
    for row, (first, last) in enumerate(zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)):
        mask = batch.loss_mask[first:last]
        found.append(
            {
                "input_ids": batch.tokens[first:last].tolist(),
                "loss_mask": mask.tolist(),
                "advantages": np.where(mask, batch.advantages[first:last], 0).tolist(),
                "inference_logprobs": np.where(mask, batch.behavior_logprobs[first:last], 0).tolist(),
                "position_ids": list(range(last - first)),
                "temperatures": [1.0] * int(last - first),
                "env_names": [batch.groups[batch.group_of_sequence()[row]].env] * int(last - first),
            }
        )
    return found


def by_tokens(sequences: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(sequences, key=lambda columns: columns["input_ids"])


@pytest.fixture
def url() -> str:
    """Return a URL with a free port, behind which another one is free."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return f"tcp://127.0.0.1:{port}"


@pytest.fixture(params=["files", "zmq"])
def to(request: pytest.FixtureRequest, tmp_path: Path, url: str) -> tuple[str | Path, str | None]:
    """Return the way to the trainer, and its URL if it has one."""
    return (tmp_path, None) if request.param == "files" else (url, url)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_sequence_arrives_once_with_its_columns(
    to: tuple[str | Path, str | None], ranks: int, tmp_path: Path
) -> None:
    trainer = PrimeRLTrainer(to[0], ranks, seq_len=16, output=tmp_path)

    with OutsideTrainer(tmp_path, ranks, to[1]).running() as outside:
        for lengths in (LENGTHS, LENGTHS[:4]):
            trainer.step(scored(lengths))

    assert [by_tokens(sequences_of(step)) for step in outside.steps] == [
        by_tokens(sequences(scored(LENGTHS))),
        by_tokens(sequences(scored(LENGTHS[:4]))),
    ]
    for step in outside.steps:
        assert len({len(rank) for rank in step}) == 1
        assert all(len(part["input_ids"]) <= 16 for rank in step for part in rank)


def test_a_rank_without_a_sequence_gets_one_that_does_not_train(tmp_path: Path) -> None:
    with OutsideTrainer(tmp_path, ranks=4).running() as outside:
        PrimeRLTrainer(tmp_path, ranks=4, seq_len=16).step(scored([3, 4]))

    masks = [part["loss_mask"] for rank in outside.steps[0] for part in rank]
    assert sorted(map(any, masks)) == [False, False, True, True]


def test_temperatures_of_turns_and_reference_logprobs_arrive(tmp_path: Path) -> None:
    ref_logprobs = np.arange(5, dtype=np.float32)
    sampled = scored([3], ref_logprobs=ref_logprobs, meta={"temperatures": [[[3, 0.5], [2, 2.0]]]})

    with OutsideTrainer(tmp_path).running() as outside:
        PrimeRLTrainer(tmp_path, 1, seq_len=16, temperature=0.7).step(sampled)

    (part,) = outside.steps[0][0]
    assert part["temperatures"] == [0.5, 0.5, 0.5, 2.0, 2.0]
    assert part["ref_logprobs"] == ref_logprobs.tolist()


def test_a_step_is_done_when_its_weights_are_there(tmp_path: Path) -> None:
    trainer = PrimeRLTrainer(tmp_path, 1, seq_len=16)

    with OutsideTrainer(tmp_path).running():
        before = trainer.weights()["w"].tolist()
        trainer.step(scored())
        after = trainer.weights()["w"].tolist()

    assert (before, after, trainer.steps) == ([0.0, 0.0], [1.0, 1.0], 1)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (batch(), "advantages and behavior_logprobs"),
        (scored([15]), "at most 16 tokens, prime-rl's model.seq_len, got 17"),
        (scored([3], loss_mask=np.zeros(5, np.bool_)), "in which a token trains"),
    ],
    ids=["no advantages", "too long", "nothing trains"],
)
def test_a_batch_that_prime_rl_cannot_train_is_refused_before_it_is_sent(
    refused: TrainBatch, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRecord, match=message):
        PrimeRLTrainer(tmp_path, 1, seq_len=16).step(refused)

    assert not (tmp_path / "rollouts").exists()


def test_a_trainer_that_never_finishes_a_step_is_told_with_the_steps_that_it_has(tmp_path: Path) -> None:
    write_weights(tmp_path, 0)

    with pytest.raises(
        TrainerSilent, match=r"step 1: expected prime-rl to write .*step_1/STABLE .*weights of steps \[0\]"
    ):
        PrimeRLTrainer(tmp_path, 1, seq_len=16, step_timeout_s=0.05).step(scored())


def test_ranks_that_never_subscribe_are_told(tmp_path: Path, url: str) -> None:
    with pytest.raises(TrainerSilent, match=r"2 ranks of prime-rl to subscribe .* got none from \[0, 1\]"):
        PrimeRLTrainer(url, 2, seq_len=16, output=tmp_path, step_timeout_s=0.05).step(scored())


async def test_a_batch_is_committed_and_its_weights_published_when_it_is_trained(tmp_path: Path) -> None:
    published: list[tuple[int, float]] = []

    class Publisher:
        version = -1

        async def publish(self, tensors: Mapping[str, Any], version: int) -> None:
            self.version = version
            published.append((version, float(tensors["w"][0])))

        @asynccontextmanager
        async def paused(self) -> AsyncIterator[None]:
            yield

    with OutsideTrainer(tmp_path).running():
        sink = PrimeRLSink(tmp_path, 1, seq_len=16, publisher=Publisher(), max_steps=2)
        driven = await drive_sink(sink, [scored(), scored(LENGTHS[:2], named="later-")])

    assert published == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert driven.ledger.balance().ended["trained"] == len(LENGTHS) + 2


async def test_a_cancelled_run_does_not_leave_a_thread_that_waits(tmp_path: Path) -> None:
    waits, ended = threading.Event(), threading.Event()

    class Watched(PrimeRLTrainer):
        def step(self, batch: TrainBatch) -> dict[str, float]:
            waits.set()
            try:
                return super().step(batch)
            finally:
                ended.set()

    sink = SinkTrainer(Watched(tmp_path, 1, seq_len=16), cancel_timeout_s=0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drive_sink, sink, [scored()])
        await anyio.to_thread.run_sync(waits.wait, FAILSAFE_S)
        tasks.cancel_scope.cancel()

    assert await anyio.to_thread.run_sync(ended.wait, FAILSAFE_S)


def test_a_rank_that_has_gone_is_named(tmp_path: Path, url: str) -> None:
    trainer = PrimeRLTrainer(url, 1, seq_len=16, output=tmp_path)
    with OutsideTrainer(tmp_path, 1, url, last=1).running():
        trainer.step(scored())

        with pytest.raises(PeerLost, match=r"step 2: ranks \[0\] of prime-rl have gone"):
            trainer.step(scored())


def test_weights_of_an_earlier_run_do_not_count_as_those_of_this_one(tmp_path: Path) -> None:
    write_weights(tmp_path, 3)

    with pytest.raises(StepsOfAnotherRun, match="step_3"):
        PrimeRLTrainer(tmp_path, 1, seq_len=16).step(scored())


def test_a_file_of_weights_that_is_cut_off_is_named(tmp_path: Path) -> None:
    write_weights(tmp_path, 0)
    path = tmp_path / "broadcasts" / "step_0" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(WeightsDamaged, match=r"model\.safetensors"):
        PrimeRLTrainer(tmp_path, 1, seq_len=16).weights()


def test_a_url_needs_the_folder_where_weights_are_written() -> None:
    with pytest.raises(ValueError, match="output_dir of prime-rl"):
        PrimeRLTrainer("tcp://127.0.0.1:5555", 1, seq_len=16)
    with pytest.raises(InvalidConfig, match="seq_len"):
        PrimeRLTrainer("outputs", 1, seq_len=0)


def test_a_resumed_run_trains_the_steps_after_its_checkpoint_again(tmp_path: Path) -> None:
    trainer = PrimeRLTrainer(tmp_path, 1, seq_len=16)
    with OutsideTrainer(tmp_path).running():
        trainer.step(scored())
        checkpoint = trainer.save(tmp_path / "checkpoints", {})
        trainer.step(scored())

    resumed = PrimeRLTrainer(tmp_path, 1, seq_len=16)
    resumed.resume(checkpoint)
    assert resumed.steps == 1
    with OutsideTrainer(tmp_path, resumed_at=1).running() as outside:
        resumed.step(scored(LENGTHS[:3]))

    assert by_tokens(sequences_of(outside.steps[0])) == by_tokens(sequences(scored(LENGTHS[:3])))
    assert resumed.weights()["w"].tolist() == [2.0, 2.0]
