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
from torch import nn

from penstock._pipeline.weights.weight_tables import published_tables
from penstock._stages.engines.torch_folder_subscriber import Subscriber, subscriber
from penstock.errors import WeightsMismatch
from penstock.torch import FolderSubscriber, WeightFolder
from penstock.weights import WeightPublisher

Published: TypeAlias = nn.Module | dict[str, Any]
Subscribed: TypeAlias = Callable[[Published], AbstractAsyncContextManager[Subscriber]]


class Rotary(nn.Module):
    """Frequencies of `theta`, which no state_dict holds."""

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
    async def opened(published: Published) -> AsyncIterator[Subscriber]:
        by_memory = request.param == "memory"
        publisher = WeightPublisher(published) if by_memory else WeightFolder(tmp_path / "weights", published)
        async with publisher, subscriber(publisher.url) as reading:
            yield reading

    return opened


@pytest.mark.parametrize("make", [Model, on_meta])
async def test_a_model_with_the_publishers_tables_is_let_in(subscribed: Subscribed, make: Callable[..., Model]) -> None:
    async with subscribed(Model(1e4, 5e5)) as subscriber:
        model = make(1e4, 5e5)
        subscriber.attach(model)

    assert published_tables(model) == published_tables(Model(1e4, 5e5))


@pytest.mark.parametrize(("make", "copied"), [(Model, False), (Model, True), (on_meta, False)])
async def test_another_table_is_refused_with_every_other_difference(
    subscribed: Subscribed, make: Callable[..., Model], *, copied: bool
) -> None:
    model = make(1e4, 1e4, width=3)
    ours, theirs = (str(published_tables(Model(theta))[0]) for theta in (1e4, 5e5))

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
    async with WeightFolder(tmp_path, trained) as publisher, FolderSubscriber(publisher.url) as subscriber:
        await publisher.publish(trained.state_dict(), 1)
        subscriber.attach(model, copied=True)
        await anyio.to_thread.run_sync(subscriber.refresh)

    assert torch.equal(model.linear.weight, trained.linear.weight)
    assert model.linear.weight.data_ptr() == memory
    assert model.linear.weight.requires_grad


def test_a_publisher_whose_tables_are_not_computed_is_refused() -> None:
    with pytest.raises(TypeError, match=r"tables are computed, got \['layers\.0\.inv_freq'\] on the meta device"):
        WeightPublisher(on_meta(1e4))


@pytest.mark.parametrize(
    "table",
    [torch.tensor(3), torch.zeros(0), torch.ones(2, dtype=torch.complex64), torch.ones(3, 4).T, torch.tensor([True])],
)
def test_a_table_may_have_any_dtype_and_shape(table: torch.Tensor) -> None:
    model = nn.Module()
    model.register_buffer("table", table, persistent=False)

    (spec,) = published_tables(model)

    model.register_buffer("table", table.clone().contiguous(), persistent=False)
    assert published_tables(model) == (spec,)


def test_a_table_of_several_places_has_all_its_names() -> None:
    shared = Rotary(1e4)

    tables = published_tables(nn.ModuleList([shared, shared]))

    assert [table.name for table in tables] == ["0.inv_freq", "1.inv_freq"]
