"""Memory of a GPU that processes share, a trainer and a sampler there, and runs that are killed.

`make test-gpu` runs this file, on a machine with one GPU or more.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import numpy as np
import pytest
import torch
import yaml
from tests.failsafe import FAILSAFE_S
from tests.gpu_real.versions import Model, tensors
from tests.stages.engines.test_torch_policy import EOS, PROMPTS, fresh_logprobs, logprobs_of
from tests.tiny_model import TinyModel
from torch import Tensor

from penstock import TrainBatch, TrajectoryGroup, Worker
from penstock.errors import NobodyListens, NoDevice, OutOfSharedMemory, PeerLost
from penstock.policies import SamplingParams
from penstock.torch import TorchPolicy, TorchTrainer, WeightFolder
from penstock.weights import WeightPublisher, WeightSubscriber

ROOT = Path(__file__).parents[2]

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

GPU = torch.device("cuda:0")

MIB = 2**20


class Publishing:
    """A process that publishes versions in memory of the GPU."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        self.url = process.stdout.readline().strip()

    def publish(self, version: int) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{version}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "published\n"

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(FAILSAFE_S) == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def publishing() -> Iterator[Publishing]:
    command = [sys.executable, "-m", "tests.gpu_real.publishing"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT,
    ) as process:
        try:
            yield Publishing(process)
        finally:
            process.kill()


def free_bytes() -> int:
    return torch.cuda.mem_get_info(GPU)[0]


def equal(found: Model, expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(found.get_buffer(name), expected[name]) for name in expected)


@pytest.mark.parametrize("built_on", [GPU, torch.device("meta")], ids=str)
async def test_versions_in_the_memory_of_a_gpu_arrive_bit_for_bit_in_another_process(built_on: torch.device) -> None:
    with publishing() as publisher:
        async with WeightSubscriber(publisher.url) as subscriber:
            model = Model(built_on)
            subscriber.attach(model)
            for version in range(1, 21):
                publisher.publish(version)
                assert await subscriber.newer() == version
                assert subscriber.refresh() == version
                assert subscriber.intact
                assert all(tensor.device == GPU for tensor in model.buffers())
                assert equal(model, tensors(version, GPU))


async def test_a_publisher_that_is_killed_is_a_lost_peer_and_its_memory_is_free_again() -> None:
    torch.zeros(1, device=GPU)
    with publishing() as publisher:
        async with WeightSubscriber(publisher.url) as subscriber:
            subscriber.attach(Model("meta"))
            publisher.publish(1)
            subscriber.refresh()
            held = free_bytes()
            publisher.kill()
            with pytest.raises(PeerLost):
                await subscriber.newer()
        url = publisher.url
    torch.cuda.empty_cache()
    assert free_bytes() > held + 60 * MIB  # two versions of 32 MiB, and what the process itself had
    with pytest.raises(NobodyListens):
        async with WeightSubscriber(url):
            pass


async def test_a_publisher_that_closes_ends_its_samplers_views() -> None:
    with publishing() as publisher:
        async with WeightSubscriber(publisher.url) as subscriber:
            subscriber.attach(Model("meta"))
            publisher.publish(1)
            subscriber.refresh()
            publisher.close()
            with pytest.raises(PeerLost, match="closed, and its memory on"):
                await subscriber.newer()


async def test_a_subscriber_in_the_process_of_its_publisher_shares_its_memory() -> None:
    async with WeightPublisher(Model(GPU), device="cuda:0") as publisher:
        await publisher.publish(tensors(3, GPU), 3)
        async with WeightSubscriber(publisher.url) as subscriber:
            model = Model("meta")
            subscriber.attach(model)
            assert subscriber.refresh() == 3
            assert equal(model, tensors(3, GPU))


async def test_versions_of_a_folder_are_copied_into_a_model_on_a_gpu(tmp_path: Path) -> None:
    published = Model("cpu")
    async with WeightFolder(tmp_path, published) as publisher, WeightSubscriber(publisher.url) as subscriber:
        model = Model(GPU)
        subscriber.attach(model, copied=True)
        for version in range(1, 6):
            await publisher.publish(tensors(version, GPU), version)
            assert await subscriber.newer(than=version - 1) == version
            assert await anyio.to_thread.run_sync(subscriber.refresh) == version
            assert all(tensor.device == GPU for tensor in model.buffers())
            assert equal(model, tensors(version, GPU))


async def test_a_gpu_without_room_and_one_that_is_not_there_are_errors() -> None:
    whole = {"whole": torch.empty(2**40, dtype=torch.uint8, device="meta")}
    with pytest.raises(OutOfSharedMemory, match="CUDA_ERROR_OUT_OF_MEMORY"):
        async with WeightPublisher(whole, device="cuda:0"):
            pass
    with pytest.raises(NoDevice, match="got 'cuda:99'"):
        async with WeightPublisher(tensors(0, "cpu"), device="cuda:99"):
            pass


@pytest.mark.parametrize("cast", [{}, {"float32": "bfloat16"}], ids=["as they are", "cast"])
async def test_tensors_of_a_gpu_are_published_in_memory_of_the_host_bit_for_bit(cast: dict[str, str]) -> None:
    async with WeightPublisher(Model(GPU), cast=cast) as publisher, WeightSubscriber(publisher.url) as subscriber:
        model = Model("meta")
        if cast:
            model.large, model.empty = model.large.bfloat16(), model.empty.bfloat16()
        subscriber.attach(model)
        for version in range(1, 6):
            published = tensors(version, GPU)
            published["odd"] = published["odd"].T.contiguous().T  # the order in memory is another one
            await publisher.publish(published, version)
            for tensor in published.values():
                tensor.zero_()  # what the trainer does next
            assert subscriber.refresh() == version
            expected = tensors(version, "cpu")
            if cast:
                expected["large"] = expected["large"].bfloat16()
            assert equal(model, expected)


def batch(seed: int = 0) -> TrainBatch:
    """Return two groups of four sequences of 3 to 40 tokens."""
    random = np.random.default_rng(seed)
    groups = []
    for number in range(2):
        lengths = random.integers(3, 40, size=4)
        count = int(lengths.sum())
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        mask = np.ones(count, bool)
        mask[offsets[:-1]] = False
        groups.append(
            TrajectoryGroup.build(
                env="e",
                instance_id=str(number),
                tokens=random.integers(11, size=count),
                offsets=offsets,
                loss_mask=mask,
                rewards=random.normal(size=4),
                behavior_logprobs=np.full(count, -2.4),
                advantages=random.normal(size=count),
            )
        )
    return TrainBatch.pack(groups)


def trainer_on(device: torch.device | str, **options: Any) -> tuple[TinyModel, TorchTrainer]:
    model = TinyModel().to(device)
    # A bias of keys has no gradient but rounding, which Adam would enlarge.
    return model, TorchTrainer(model, optimizer=partial(torch.optim.SGD, lr=1e-2), micro_batch_tokens=64, **options)


def test_steps_on_a_gpu_give_the_weights_and_metrics_of_steps_on_a_cpu() -> None:
    (there, on_gpu), (here, on_cpu) = trainer_on(GPU), trainer_on("cpu")

    for seed in range(3):
        found, expected = on_gpu.step(batch(seed)), on_cpu.step(batch(seed))
        for name in ("loss", "grad_norm", "entropy"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name

    for name, tensor in here.state_dict().items():
        torch.testing.assert_close(there.state_dict()[name].cpu(), tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_half_precision_on_a_gpu_stays_near_float32(autocast: torch.dtype) -> None:
    (_, half), (_, whole) = trainer_on(GPU, autocast=autocast), trainer_on(GPU)

    for seed in range(5):
        found, expected = half.step(batch(seed)), whole.step(batch(seed))
        assert found["loss"] == pytest.approx(expected["loss"], rel=0.1, abs=0.02)
        assert all(np.isfinite(value) for value in found.values())


def test_a_checkpoint_of_a_gpu_continues_there_bit_for_bit_and_on_a_cpu_nearly(tmp_path: Path) -> None:
    model, trainer = trainer_on(GPU)
    trainer.step(batch(0))
    folder = trainer.save(tmp_path, {})
    drawn = torch.rand(3, device=GPU)
    trainer.step(batch(1))

    (again, resumed), (moved, elsewhere) = trainer_on(GPU), trainer_on("cpu")
    resumed.resume(folder)
    assert torch.equal(torch.rand(3, device=GPU), drawn)
    resumed.step(batch(1))
    elsewhere.resume(folder)
    elsewhere.step(batch(1))

    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
        torch.testing.assert_close(moved.state_dict()[name], tensor.cpu(), rtol=1e-4, atol=1e-5)


def on_gpu() -> TinyModel:
    return TinyModel().to(GPU)


async def test_a_sampler_on_a_gpu_reports_the_log_probabilities_of_a_forward_pass_on_a_cpu() -> None:
    async with TorchPolicy(on_gpu, EOS, max_rows=5).open(Worker()) as engine:  # rows join and leave
        sampled = await engine.generate(PROMPTS * 8, SamplingParams(max_completion_tokens=24))

    for given, completion in zip(PROMPTS * 8, sampled, strict=True):
        np.testing.assert_allclose(logprobs_of(completion), fresh_logprobs(TinyModel(), given, completion), atol=1e-4)


async def test_a_sampler_and_a_trainer_share_versions_in_the_memory_of_a_gpu() -> None:
    model, trainer = trainer_on(GPU)
    async with WeightPublisher(model, device="cuda:0") as publisher:
        await publisher.publish(model.state_dict(), 0)
        policy = TorchPolicy(on_gpu, EOS, weights=publisher.url)
        async with policy.open(Worker()) as engine:
            for step in range(1, 4):
                trainer.step(batch(step))
                await publisher.publish(model.state_dict(), step)
                (sampled,) = await engine.generate(PROMPTS[:1], SamplingParams(max_completion_tokens=4, greedy=True))
                assert min(sampled.policy_versions) >= step - 1


def run(folder: Path, *overrides: str) -> subprocess.Popen[bytes]:
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "penstock", "run", "config.yaml", *overrides],
            cwd=folder,
            stdout=output,
            stderr=output,
            env=ENVIRONMENT,
        )


def lines_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("samplers", [1, 2])
def test_a_run_on_a_gpu_learns_and_goes_on_after_its_processes_are_killed(tmp_path: Path, samplers: int) -> None:
    made = [sys.executable, "-m", "penstock", "init", "--tiny", "task"]
    subprocess.run(made, cwd=tmp_path, check=True, env=ENVIRONMENT)
    folder = tmp_path / "task"
    values = yaml.safe_load((folder / "config.yaml").read_text())
    values["placement"] = {**values.get("placement", {}), "samplers": samplers}
    values["folder"] = "run"
    (folder / "config.yaml").write_text(yaml.safe_dump(values))

    first = run(folder)
    while len(lines_of(folder)) < 4:
        assert first.poll() is None, (folder / "output.txt").read_text()
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert run(folder).wait() == 0, (folder / "output.txt").read_text()

    lines = lines_of(folder)
    rewards = [line["reward"] for line in lines if "reward" in line]
    assert np.mean(rewards[-3:]) > 0.9
    steps = [line["step"] for line in lines if "loss" in line]
    assert sorted(set(steps)) == list(range(1, max(steps) + 1))
