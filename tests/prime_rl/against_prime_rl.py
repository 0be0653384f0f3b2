"""prime-rl's own loader, packing and loss take what PrimeRLSink sends: `make test-prime-rl PRIME_RL=<checkout>`."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import pytest
from tests.failsafe import FAILSAFE_S
from tests.ports import two_free_ports
from tests.prime_rl.outside_trainer import FIELDS
from tests.prime_rl.test_trainer import by_tokens, scored, sequences, sequences_of
from tests.trl_real.letters import flow_of, publisher_of, write_model

from penstock import Batcher, Report, SinkTrainer
from penstock.errors import PeerLost
from penstock.integrations.prime_rl import PrimeRLSink, PrimeRLTrainer

STEPS = 12
SEQ_LEN = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def settings(output: Path, transport: dict[str, Any]) -> dict[str, Any]:
    """Return prime-rl's TrainerConfig."""
    return {"output_dir": str(output), "rollout_transport": transport, "optim": {"type": "adamw", "lr": 1e-2}}


@contextmanager
def prime_rl(
    model: Path, config: dict[str, Any], steps: int, ranks: int = 1, resumed_at: int = 0
) -> Iterator[list[Any]]:
    """Run prime-rl's loop in a process a rank within the body, and yield the processes."""
    command = [sys.executable, "-m", "tests.prime_rl.prime_rl_loop", str(model), json.dumps(config), str(steps)]
    environment = os.environ | {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "TORCHDYNAMO_DISABLE": "1"}
    started = [
        subprocess.Popen([*command, str(resumed_at)], env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    try:
        yield started
        assert [process.wait(FAILSAFE_S) for process in started] == [0] * ranks
    finally:
        for process in started:
            process.kill()
            process.wait()


def received(output: Path, step: int, ranks: int) -> list[list[dict[str, Any]]]:
    """Return the micro-batches of a step that prime-rl's loader made, by rank."""
    return [msgspec.json.decode((output / "received" / f"{step}-{rank}.json").read_bytes()) for rank in range(ranks)]


def test_the_fields_are_those_of_prime_rl() -> None:
    types = importlib.import_module("prime_rl.transports.rollouts.types")

    assert types.MicroBatch.__struct_fields__ == FIELDS
    assert types.MicroBatch.__struct_config__.array_like


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", ["filesystem", "zmq"])
def test_its_loader_makes_the_tensors_that_its_own_packing_leads_to(
    kind: str, ranks: int, model: Path, tmp_path: Path
) -> None:
    batch, port = scored(), two_free_ports()
    transport = {"type": kind} | ({"host": "127.0.0.1", "port": port} if kind == "zmq" else {})
    to = f"tcp://127.0.0.1:{port}" if kind == "zmq" else tmp_path

    with prime_rl(model, settings(tmp_path, transport), 1, ranks):
        PrimeRLTrainer(to, ranks, seq_len=SEQ_LEN, output=tmp_path, step_timeout_s=FAILSAFE_S).step(batch)

    samples = importlib.import_module("prime_rl.transports.rollouts.types").TrainingSample
    packing = importlib.import_module("prime_rl.trainer.batch")
    rollouts = [
        samples(
            token_ids=columns["input_ids"],
            mask=columns["loss_mask"],
            logprobs=columns["inference_logprobs"],
            temperatures=columns["temperatures"],
            env_name=columns["env_names"][0],
            advantages=columns["advantages"],
        )
        for columns in sequences(batch)
    ]
    own = packing.prepare_batch(rollouts, SEQ_LEN, ranks, packing.build_bin_cost(None))
    theirs = [[dict(zip(FIELDS, msgspec.to_builtins(part), strict=False)) for part in rank] for rank in own]
    ours = received(tmp_path, 1, ranks)

    assert by_tokens(sequences_of(ours)) == by_tokens(sequences_of(theirs))
    assert len({len(rank) for rank in ours}) == 1


def test_the_reward_rises_and_the_balance_closes(model: Path, tmp_path: Path) -> None:
    publisher = publisher_of(model)
    sink = PrimeRLSink(tmp_path, 1, seq_len=SEQ_LEN, publisher=publisher, max_steps=STEPS, step_timeout_s=FAILSAFE_S)

    async def run() -> Report:
        async with publisher:
            flow = await anyio.to_thread.run_sync(flow_of, model, publisher.url)  # reads files
            return await flow.then(Batcher(max_tokens=512, sequences=32)).sink(sink).run(folder=tmp_path / "run")

    with prime_rl(model, settings(tmp_path, {"type": "filesystem"}), STEPS):
        report = anyio.run(run)

    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["reward"] for line in lines]
    assert len(rewards) == STEPS
    assert np.mean(rewards[-3:]) > 2 * np.mean(rewards[:3])
    assert report.balance.in_flight == 0
    assert report.balance.ended["trained"] == STEPS * 32
    assert report.balance.ended["stale"] == 0


def test_a_rank_that_has_gone_is_named(model: Path, tmp_path: Path) -> None:
    port = two_free_ports()
    transport = {"type": "zmq", "host": "127.0.0.1", "port": port}
    trainer = PrimeRLTrainer(f"tcp://127.0.0.1:{port}", 1, seq_len=SEQ_LEN, output=tmp_path, step_timeout_s=FAILSAFE_S)

    with prime_rl(model, settings(tmp_path, transport), 1) as processes:
        trainer.step(scored())
        processes[0].wait(FAILSAFE_S)

        with pytest.raises(PeerLost, match=r"step 2: ranks \[0\]"):
            trainer.step(scored())


def test_both_resume_from_the_same_step(model: Path, tmp_path: Path) -> None:
    config = settings(tmp_path, {"type": "filesystem"})
    trainer = PrimeRLTrainer(tmp_path, 1, seq_len=SEQ_LEN, step_timeout_s=FAILSAFE_S)
    with prime_rl(model, config, 2):
        trainer.step(scored())
        checkpoint = trainer.save(tmp_path / "checkpoints", {})
        trainer.step(scored())

    resumed = PrimeRLTrainer(tmp_path, 1, seq_len=SEQ_LEN, step_timeout_s=FAILSAFE_S)
    resumed.resume(checkpoint)
    with prime_rl(model, config, 2, resumed_at=1):
        resumed.step(scored([3, 4]))

    assert resumed.steps == 2
    assert len(sequences_of(received(tmp_path, 2, 1))) == 2
    assert isinstance(PrimeRLSink(tmp_path, 1, seq_len=SEQ_LEN), SinkTrainer)
