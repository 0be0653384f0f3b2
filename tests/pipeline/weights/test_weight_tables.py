"""Buffers outside the state_dict are compared with the publisher's, through memory and through a folder."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import anyio.to_thread
import pytest
import torch
import xxhash
from torch import nn

from penstock.errors import WeightsMismatch
from penstock.torch import WeightFolder
from penstock.weights import WeightPublisher, WeightSubscriber

Published: TypeAlias = nn.Module | dict[str, Any]
Subscribed: TypeAlias = Callable[[Published], AbstractAsyncContextManager[WeightSubscriber]]


class Rotary(nn.Module):
    """Frequencies of `theta`, a buffer outside the state_dict."""

    def __init__(self, theta: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.theta = theta
        self.dtype = dtype
        frequencies = theta ** -torch.arange(0, 1, 0.25)
        self.register_buffer("inv_freq", frequencies.to(dtype), persistent=False)


class Model(nn.Module):
    """Two rotary tables and a weight."""

    def __init__(self, *thetas: float, width: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Rotary(theta) for theta in thetas)
        self.linear = nn.Linear(width, width, bias=False)


def on_meta(*thetas: float, width: int = 2) -> Model:
    with torch.device("meta"):
        return Model(*thetas, width=width)


@pytest.fixture(params=["memory", "folder"])
def subscribed(request: pytest.FixtureRequest, tmp_path: Path) -> Subscribed:
    """Return a function that opens a subscriber to published weights, over each transport."""

    @asynccontextmanager
    async def opened(published: Published) -> AsyncIterator[WeightSubscriber]:
        if request.param == "memory":
            async with WeightPublisher(published) as publisher, WeightSubscriber(publisher.url) as subscriber:
                yield subscriber
        else:
            async with WeightFolder(tmp_path / "weights", published) as folder, WeightSubscriber(folder.url) as reader:
                yield reader

    return opened


@pytest.mark.parametrize("make", [Model, on_meta])
async def test_a_model_with_the_publishers_tables_is_attached(
    subscribed: Subscribed, make: Callable[..., Model]
) -> None:
    async with subscribed(Model(1e4, 5e5)) as subscriber:
        model = make(1e4, 5e5)
        subscriber.attach(model)

    expected = dict(Model(1e4, 5e5).named_buffers())
    assert {name: table.tolist() for name, table in model.named_buffers()} == {
        name: table.tolist() for name, table in expected.items()
    }


@pytest.mark.parametrize(("make", "copied"), [(Model, False), (Model, True), (on_meta, False)])
async def test_another_table_is_refused_with_every_other_difference(
    subscribed: Subscribed, make: Callable[..., Model], *, copied: bool
) -> None:
    model = make(1e4, 1e4, width=3)
    digests = [
        xxhash.xxh3_128_hexdigest(Rotary(theta).get_buffer("inv_freq").numpy().tobytes()) for theta in (1e4, 5e5)
    ]
    ours, theirs = (f"float32 [4] of xxh3 {digest}" for digest in digests)

    async with subscribed(Model(1e4, 5e5)) as subscriber:
        with pytest.raises(WeightsMismatch) as caught:
            subscriber.attach(model, copied=copied)

    assert str(caught.value).splitlines()[1:] == [
        "  linear.weight: expected float32 [3, 3], found float32 [2, 2]",
        f"  layers.1.inv_freq: expected {ours}, found {theirs}: from another configuration or dtype, or changed since",
    ]
    assert model.get_buffer("layers.0.inv_freq").is_meta is (make is on_meta), "nothing was changed"


async def test_tables_that_are_missing_extra_or_of_another_dtype_are_refused(subscribed: Subscribed) -> None:
    model = Model(1e4, 1e4)
    model.layers[1] = Rotary(1e4, torch.bfloat16)

    async with subscribed(Model(1e4, 1e4)) as subscriber:
        with pytest.raises(
            WeightsMismatch, match=r"1\.inv_freq: expected bfloat16 \[4\] .*, found float32 \[4\] .*\w$"
        ):
            subscriber.attach(model)
        with pytest.raises(WeightsMismatch, match=r"1\.inv_freq: expected no such table, found float32 \[4\]"):
            subscriber.attach(Model(1e4))
        with pytest.raises(WeightsMismatch, match=r"2\.inv_freq: expected float32 \[4\] of xxh3 \w+, found none"):
            subscriber.attach(Model(1e4, 1e4, 1e4))
        with pytest.raises(WeightsMismatch, match=r"1\.inv_freq: expected float32 \[4\] of the meta device"):
            subscriber.attach(on_meta(1e4, 1e4), copied=True)


async def test_what_cannot_be_computed_is_listed_with_the_other_differences(subscribed: Subscribed) -> None:
    class Forgetful(nn.Module):
        def __init__(self, theta: float) -> None:
            super().__init__()
            self.register_buffer("inv_freq", theta ** -torch.arange(0, 1, 0.25), persistent=False)

    model = on_meta(1e4, 1e4)
    with torch.device("meta"):
        model.layers[0] = Forgetful(1e4)

    async with subscribed(Model(1e4, 5e5)) as subscriber:
        with pytest.raises(WeightsMismatch) as caught:
            subscriber.attach(model)

    head, *lines = str(caught.value).splitlines()
    assert head.endswith("do not fit the model: 1 tensors differ")
    assert [line.split(":")[0] for line in lines] == [
        "  layers.1.inv_freq",
        "1 tensors on the meta device cannot be computed",
        "  layers.0.inv_freq",
        "Set them before the weights are attached, or build these modules on cpu",
    ]


async def test_without_a_module_tables_are_not_compared(subscribed: Subscribed) -> None:
    async with subscribed(Model(1e4, 5e5).state_dict()) as subscriber:
        subscriber.attach(on_meta(3.0, 4.0))
    async with subscribed(Model(1e4, 5e5)) as subscriber:
        subscriber.attach(Model(3.0, 4.0).state_dict())


async def test_a_module_is_filled_in_place_where_it_is_to_be_copied(tmp_path: Path) -> None:
    model, trained = Model(1e4), Model(1e4)
    memory = model.linear.weight.data_ptr()
    async with WeightFolder(tmp_path, trained) as publisher, WeightSubscriber(publisher.url) as subscriber:
        await publisher.publish(trained.state_dict(), 1)
        subscriber.attach(model, copied=True)
        await subscriber.newer()
        await anyio.to_thread.run_sync(subscriber.refresh)

    assert torch.equal(model.linear.weight, trained.linear.weight)
    assert model.linear.weight.data_ptr() == memory
    assert model.linear.weight.requires_grad


def test_a_publisher_whose_tables_are_not_computed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tables are computed, got \['layers\.0\.inv_freq'\] on the meta device"):
        WeightPublisher(on_meta(1e4))


@pytest.mark.parametrize(
    "table",
    [torch.tensor(3), torch.zeros(0), torch.ones(2, dtype=torch.complex64), torch.ones(3, 4).T, torch.tensor([True])],
)
async def test_a_table_may_have_any_dtype_and_shape(subscribed: Subscribed, table: torch.Tensor) -> None:
    def with_table(table: torch.Tensor) -> Model:
        model = Model()
        model.register_buffer("table", table, persistent=False)
        return model

    async with subscribed(with_table(table)) as subscriber:
        subscriber.attach(with_table(table.clone().contiguous()))
        with pytest.raises(WeightsMismatch, match=r"table: expected .*, found"):
            subscriber.attach(with_table(torch.full((5,), 7)))


async def test_a_table_of_several_places_has_all_its_names(subscribed: Subscribed) -> None:
    shared, layer = Rotary(1e4), nn.Linear(2, 2)

    async with subscribed(nn.ModuleList([shared, shared, layer])) as subscriber:
        with pytest.raises(WeightsMismatch) as refused:
            subscriber.attach(nn.ModuleList([nn.Identity(), nn.Identity(), nn.Linear(2, 2)]))

    assert [line.split(":")[0].strip() for line in str(refused.value).splitlines()[1:]] == ["0.inv_freq", "1.inv_freq"]
