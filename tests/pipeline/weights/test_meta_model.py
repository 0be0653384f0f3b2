from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import WeightsMismatch
from penstock.weights import WeightPublisher, WeightSubscriber


class Rotary(nn.Module):
    """Frequencies as other libraries keep them: a buffer outside the state_dict, and a copy as an attribute."""

    def __init__(self, dim: int, theta: float) -> None:
        super().__init__()
        self.dim = dim
        self.theta = theta
        self.register_buffer(
            "inv_freq", theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim), persistent=False
        )
        self.original = self.inv_freq


class Model(nn.Module):
    """A model with rotary tables at several depths."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"rotary": Rotary(8, theta)}) for theta in (1e4, 5e5))
        self.linear = nn.Linear(2, 2)


def on_meta(make: type[nn.Module], *arguments: object) -> nn.Module:
    with torch.device("meta"):
        return make(*arguments)


async def attach(model: nn.Module) -> None:
    """Attach `model`, beside one more layer, to weights in shared memory."""
    whole = nn.ModuleDict({"model": model, "layer": on_meta(nn.Linear, 2, 2)})
    weights = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in whole.state_dict().items()}
    async with WeightPublisher(weights) as publisher, WeightSubscriber(publisher.url) as subscriber:
        subscriber.attach(whole)


async def test_every_table_is_made_from_its_modules_own_arguments() -> None:
    model, made = on_meta(Model), Model()

    await attach(model)

    tables = {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}
    assert tables.keys() == {"layers.0.rotary.inv_freq", "layers.1.rotary.inv_freq"}
    assert all(torch.equal(table, made.get_buffer(name)) for name, table in tables.items())
    assert all(not module.original.is_meta for module in model.modules() if isinstance(module, Rotary))
    assert model.get_parameter("linear.weight").is_meta, "a published tensor"
    assert not model.state_dict().keys() & tables.keys()


async def test_a_table_is_of_the_dtype_that_the_model_was_brought_to() -> None:
    rotary = on_meta(Rotary, 8, 5e5).to(torch.bfloat16)

    await attach(rotary)

    assert torch.equal(rotary.get_buffer("inv_freq"), Rotary(8, 5e5).to(torch.bfloat16).get_buffer("inv_freq"))


async def test_no_random_number_is_drawn() -> None:
    class Noisy(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.width = width
            self.linear = nn.Linear(width, width)
            self.register_buffer("table", torch.arange(width), persistent=False)

    model = on_meta(Noisy, 3)
    state = torch.get_rng_state()

    await attach(model)

    assert torch.equal(torch.get_rng_state(), state)
    assert model.get_buffer("table").tolist() == [0, 1, 2]


class Projected(nn.Module):
    """Draws its table from random numbers."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("table", torch.randn(dim), persistent=False)


class Forgetful(nn.Module):
    """Keeps no attribute for one of its arguments."""

    def __init__(self, dim: int, theta: float = 10_000.0) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("inv_freq", theta ** -torch.arange(0, 1, 2 / dim), persistent=False)


class Halving(nn.Module):
    """Keeps another value under the name of an argument."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim // 2
        self.register_buffer("table", torch.arange(self.dim), persistent=False)


class Listing(nn.Module):
    """Keeps tensors in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = [torch.arange(3)]


class Anything(nn.Module):
    """Has arguments without names."""

    def __init__(self, **options: float) -> None:
        super().__init__()
        self.register_buffer("table", torch.tensor([options["theta"]]), persistent=False)


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (on_meta(Forgetful, 8, 5e5), r"model\.inv_freq: expected Forgetful to keep its argument theta as an attribute"),
        (on_meta(Halving, 8), r"model\.table: made again, Halving has dim = 2, expected 4"),
        (on_meta(Projected, 8), r"model\.table: expected the same numbers whenever Projected is made, found random"),
        (on_meta(Listing), r"model\.tables: expected a tensor, found tables that contains some"),
        (nn.Sequential(nn.ReLU(), on_meta(Forgetful, 8)), r"1\.inv_freq: expected Forgetful to keep"),
    ],
    ids=["default", "changed", "random", "list", "nested"],
)
async def test_an_unknown_argument_is_refused(model: nn.Module, line: str) -> None:
    with pytest.raises(WeightsMismatch, match=line):
        await attach(model)


async def test_arguments_without_names_are_not_guessed() -> None:
    with torch.device("meta"):
        model = Anything(theta=5e5)

    with pytest.raises(WeightsMismatch, match=r"model\.table: expected Anything to keep its argument options"):
        await attach(model)


async def test_everything_that_is_missing_is_listed_and_nothing_was_changed() -> None:
    model = nn.ModuleList([on_meta(Rotary, 8, 5e5), on_meta(Forgetful, 8), on_meta(Listing)])

    with pytest.raises(WeightsMismatch) as refused:
        await attach(model)

    lines = str(refused.value).splitlines()[1:-1]
    assert [line.split(":")[0].strip() for line in lines] == ["model.1.inv_freq", "model.2.tables"]
    assert model.get_buffer("0.inv_freq").is_meta


async def test_a_table_that_was_set_by_hand_is_not_changed() -> None:
    model = on_meta(Forgetful, 8)
    mine: Tensor = torch.tensor([1.0, 0.5, 0.25, 0.125])
    model.inv_freq = mine

    await attach(model)

    assert model.inv_freq is mine
