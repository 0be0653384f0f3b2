"""Models whose tensors are views of published weights: one copy, never a mixture, also beside a stuck process."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
from anyio.lowlevel import checkpoint
from tests.failsafe import FAILSAFE_S
from tests.moments import moment
from tests.processes.children import child, line
from torch import nn

from penstock.errors import PeerLost, WeightsMismatch
from penstock.weights import WeightPublisher, WeightSubscriber

MIB = 2**20


class Model(nn.Module):
    """Tied, nested, with buffers of both kinds."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(width, width)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(width, width)), nn.LayerNorm(width)])
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.token.weight
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("scratch", torch.full((2,), 5.0), persistent=False)


def filled(model: nn.Module, value: float) -> dict[str, torch.Tensor]:
    """Return tensors to publish, of the model's shapes and tied like them."""
    made: dict[int, torch.Tensor] = {}
    state = model.state_dict(keep_vars=True)
    return {name: made.setdefault(id(old), torch.full_like(old.detach(), value)) for name, old in state.items()}


def values(model: nn.Module) -> set[float]:
    return {value for tensor in model.state_dict().values() for value in tensor.unique().tolist()}


def resident(kind: str) -> int:
    """Return bytes of this process' memory: RssAnon is private, RssShmem shared."""
    (found,) = re.findall(rf"^{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found) * 1024


# -- one copy ----------------------------------------------------------------------------------------------------------


async def test_a_models_tensors_are_the_memory_that_was_published() -> None:
    model = Model()
    parameters = list(model.parameters())

    async with WeightPublisher(filled(model, 0)) as publisher, WeightSubscriber(publisher.url) as subscriber:
        subscriber.attach(model)
        seen: list[set[int]] = []
        for version in (1, 2, 3):
            await publisher.publish(filled(model, version), version)
            async with subscriber.sampling():
                assert subscriber.refresh() == version
            assert values(model) == {version}
            seen.append({tensor.data_ptr() for tensor in model.state_dict().values()})
        memory = np.asarray(subscriber._opened().memory.bytes)  # type: ignore[union-attr]
        first, last = memory.ctypes.data, memory.ctypes.data + len(memory)

    assert all(first <= pointer < last for pointers in seen for pointer in pointers)
    assert seen[0] == seen[2] != seen[1], "two buffers, in turns"
    assert [id(parameter) for parameter in model.parameters()] == [id(parameter) for parameter in parameters]
    assert model.head.weight is model.token.weight
    assert model.get_buffer("scratch").tolist() == [5, 5], "no state_dict holds it: it stays"


async def test_a_model_that_is_views_takes_no_memory_of_its_own() -> None:
    width = 4096  # a matrix of 64 MiB: memory for more than 32 MiB is never that of an earlier test (mallopt(3))
    with torch.device("meta"):
        viewed, copied = nn.Linear(width, width), nn.Linear(width, width).to_empty(device="cpu")
    weights = {name: torch.ones(tensor.shape) for name, tensor in viewed.state_dict().items()}

    async with WeightPublisher(weights) as publisher, WeightSubscriber(publisher.url) as subscriber:
        await publisher.publish(weights, 1)
        before = resident("RssAnon")
        subscriber.attach(viewed)
        subscriber.refresh()
        total = float(sum(parameter.sum() for parameter in viewed.parameters()))
        by_views = resident("RssAnon") - before
        subscriber.attach(copied.state_dict())
        subscriber.refresh()
        by_copies = resident("RssAnon") - before

    assert total == width * (width + 1)
    assert by_views < 4 * MIB
    assert by_copies > 60 * MIB, "else the measure measures nothing"


async def test_a_model_that_is_views_takes_no_gradients() -> None:
    model = Model()

    async with WeightPublisher(model.state_dict()) as publisher, WeightSubscriber(publisher.url) as subscriber:
        subscriber.attach(model)

    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda state: state.pop("layers.0.0.weight"), r"layers\.0\.0\.weight: expected float32 \[4, 4\], found none"),
        (lambda state: state.pop("seen"), r"seen: expected int64 \[3\], found none"),
        (
            lambda state: state.update({"layers.1.bias": torch.zeros(4, dtype=torch.bfloat16)}),
            r"layers\.1\.bias: expected float32 \[4\], found bfloat16 \[4\]",
        ),
        (lambda state: state.update(extra=torch.zeros(1)), r"extra: expected no such tensor, found float32 \[1\]"),
        (
            lambda state: state.update({"head.weight": torch.zeros(4, 4)}),
            r"head\.weight: expected one tensor with token",
        ),
    ],
    ids=["of a list", "buffer", "dtype", "extra", "tie"],
)
async def test_a_model_that_does_not_fit_stays_as_it_is(change: object, line: str) -> None:
    model = Model()
    pointers = {tensor.data_ptr() for tensor in model.state_dict().values()}
    published = filled(model, 0)
    change(published)  # type: ignore[operator]

    async with WeightPublisher(published) as publisher, WeightSubscriber(publisher.url) as subscriber:
        with pytest.raises(WeightsMismatch, match=line):
            subscriber.attach(model)

    assert {tensor.data_ptr() for tensor in model.state_dict().values()} == pointers


async def test_a_model_that_was_built_on_the_meta_device_becomes_views_with_its_ties() -> None:
    with torch.device("meta"):
        model = Model()
    model.scratch = torch.zeros(2)  # its constructor takes a width that it does not keep

    async with WeightPublisher(filled(Model(), 0)) as publisher, WeightSubscriber(publisher.url) as subscriber:
        subscriber.attach(model)
        for version in (1, 2):
            await publisher.publish(filled(Model(), version), version)
            subscriber.refresh()
            assert values(model) == {version}

    assert model.head.weight is model.token.weight
    assert isinstance(model.layers[1].weight, nn.Parameter)


# -- never a mixture ---------------------------------------------------------------------------------------------------


async def test_publishing_waits_for_the_batch_that_is_sampled_from_the_buffer_it_needs() -> None:
    model = Model()
    story: list[str] = []

    async def publish(publisher: WeightPublisher) -> None:
        for version in (2, 3):
            await publisher.publish(filled(model, version), version)
            story.append(f"published {version}")

    async with WeightPublisher(filled(model, 0)) as publisher, WeightSubscriber(publisher.url) as subscriber:
        subscriber.attach(model)
        await publisher.publish(filled(model, 1), 1)
        async with anyio.create_task_group() as tasks, subscriber.sampling():
            subscriber.refresh()
            while not _holding(publisher):
                await moment()
            tasks.start_soon(publish, publisher)
            while subscriber.latest < 2:
                await moment()
            for _ in range(100):
                await checkpoint()
            assert values(model) == {1}
            assert subscriber.intact
            story.append("sampled with 1")

    assert story == ["published 2", "sampled with 1", "published 3"]


def _holding(publisher: WeightPublisher) -> list[int]:
    return [subscription.holding for subscription in publisher._subscriptions.all if subscription.holding]


async def test_a_subscriber_that_does_not_sample_delays_no_publisher() -> None:
    model = Model()

    async with WeightPublisher(filled(model, 0)) as publisher, WeightSubscriber(publisher.url) as subscriber:
        subscriber.attach(model)
        with anyio.fail_after(FAILSAFE_S):
            for version in range(20):
                await publisher.publish(filled(model, version), version)
                if version == 3:
                    async with subscriber.sampling():
                        subscriber.refresh()


async def test_samples_beyond_the_publishers_timeout_are_discarded() -> None:
    model = Model()

    async with (
        WeightPublisher(filled(model, 0), release_timeout_s=0.01) as publisher,
        WeightSubscriber(publisher.url) as subscriber,
    ):
        subscriber.attach(model)
        await publisher.publish(filled(model, 1), 1)
        async with subscriber.sampling():
            subscriber.refresh()
            await publisher.publish(filled(model, 2), 2)
            assert subscriber.intact
            await publisher.publish(filled(model, 3), 3)
            assert not subscriber.intact
            assert subscriber.refresh() == 3
            assert subscriber.intact
            assert values(model) == {3}


SAMPLING = """
    import sys, anyio, torch
    from penstock.weights import WeightSubscriber

    async def main():
        with torch.device("meta"):
            model = torch.nn.Linear(4, 4)
        async with WeightSubscriber(sys.argv[1]) as subscriber, subscriber.sampling():
            subscriber.attach(model)
            for _ in range(2):
                subscriber.refresh()
                while subscriber._reported_held != subscriber._held:
                    await anyio.lowlevel.checkpoint()
                print(subscriber.version, subscriber.intact, *set(model.weight.flatten().tolist()), flush=True)
                await anyio.to_thread.run_sync(sys.stdin.readline)
                print(subscriber.intact, flush=True)

    anyio.run(main)
"""


async def test_a_sampler_that_is_stopped_or_killed_in_a_batch_delays_others_for_a_bounded_time() -> None:
    model = nn.Linear(4, 4)

    async with WeightPublisher(filled(model, 0), release_timeout_s=0.05) as publisher:
        await publisher.publish(filled(model, 1), 1)
        with child(SAMPLING, publisher.url) as sampler:
            printed = [await line(sampler)]
            while not _holding(publisher):
                await moment()
            sampler.send_signal(signal.SIGSTOP)
            for version in (2, 3):
                await publisher.publish(filled(model, version), version)
            sampler.send_signal(signal.SIGCONT)
            print(file=sampler.stdin, flush=True)
            printed += [await line(sampler), await line(sampler)]
            while not _holding(publisher):
                await moment()
            publisher._subscriptions.release_timeout_s = 60
            await publisher.publish(filled(model, 4), 4)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(publisher.publish, filled(model, 5), 5)
                for _ in range(10):
                    await checkpoint()
                assert publisher.version == 4
                sampler.kill()

    assert publisher.subscribers == []
    assert [printed.split() for printed in printed] == [["1", "True", "1.0"], ["False"], ["3", "True", "3.0"]]


PUBLISHING = """
    import anyio, numpy as np
    from penstock.weights import WeightPublisher

    async def main():
        async with WeightPublisher({"weight": np.ones((4, 4), np.float32)}, name="trainer") as publisher:
            await publisher.publish({"weight": np.full((4, 4), 2, np.float32)}, version=2)
            print(publisher.url, flush=True)
            await anyio.sleep_forever()

    anyio.run(main)
"""


async def test_the_weights_of_a_killed_publisher_stay_and_its_files_are_removed_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # a folder that no other process cleans
    model = nn.Linear(4, 4, bias=False)

    with child(PUBLISHING) as publisher:
        url = await line(publisher)
        async with WeightSubscriber(url) as subscriber:
            subscriber.attach(model)
            subscriber.refresh()
            publisher.kill()
            with pytest.raises(PeerLost):
                await subscriber.newer()
            assert values(model) == {2}
            assert subscriber.intact
            directory = anyio.Path(url.removeprefix("weights://"))
            assert directory.parent == anyio.Path(tmp_path)
            with anyio.fail_after(FAILSAFE_S):
                while await directory.exists():
                    await moment()
