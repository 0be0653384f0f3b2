from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from penstock._pipeline.weights.meta_model import MetaMaterializer


class Rotary(nn.Module):
    """Frequencies as models of others keep them: a buffer that no state_dict holds, and a copy as an attribute."""

    def __init__(self, dim: int, theta: float) -> None:
        super().__init__()
        self.dim = dim
        self.theta = theta
        self.register_buffer(
            "inv_freq", theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim), persistent=False
        )
        self.original = self.inv_freq


class Model(nn.Module):
    """Rotary tables at several depths."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"rotary": Rotary(8, theta)}) for theta in (1e4, 5e5))
        self.linear = nn.Linear(2, 2)


def on_meta(make: type[nn.Module], *arguments: object) -> nn.Module:
    with torch.device("meta"):
        return make(*arguments)


def test_every_table_is_made_from_its_modules_own_arguments() -> None:
    model, made = on_meta(Model), Model()

    MetaMaterializer(model, "cpu").apply()

    tables = {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}
    assert tables.keys() == {"layers.0.rotary.inv_freq", "layers.1.rotary.inv_freq"}
    assert all(torch.equal(table, made.get_buffer(name)) for name, table in tables.items())
    assert all(not module.original.is_meta for module in model.modules() if isinstance(module, Rotary))
    assert model.get_parameter("linear.weight").is_meta, "that is published"
    assert not model.state_dict().keys() & tables.keys()


def test_a_table_is_of_the_dtype_that_the_model_was_brought_to() -> None:
    rotary = on_meta(Rotary, 8, 5e5).to(torch.bfloat16)

    MetaMaterializer(rotary, "cpu").apply()

    assert torch.equal(rotary.get_buffer("inv_freq"), Rotary(8, 5e5).to(torch.bfloat16).get_buffer("inv_freq"))


def test_no_random_number_is_drawn() -> None:
    class Noisy(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.width = width
            self.linear = nn.Linear(width, width)
            self.register_buffer("table", torch.arange(width), persistent=False)

    model = on_meta(Noisy, 3)
    state = torch.get_rng_state()

    MetaMaterializer(model, "cpu").apply()

    assert torch.equal(torch.get_rng_state(), state)
    assert model.get_buffer("table").tolist() == [0, 1, 2]


class Projected(nn.Module):
    """Draws its table: nobody knows which one the trainer has."""

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
    """Keeps something else under the name of an argument."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim // 2
        self.register_buffer("table", torch.arange(self.dim), persistent=False)


class Listing(nn.Module):
    """Keeps tensors where nobody can tell which they are."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = [torch.arange(3)]


class Anything(nn.Module):
    """Its arguments have no names."""

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
def test_an_unknown_argument_is_refused(model: nn.Module, line: str) -> None:
    (refusal,) = MetaMaterializer(model, "cpu").refusals

    assert re.search(line, refusal)


def test_arguments_without_names_are_not_guessed() -> None:
    with torch.device("meta"):
        model = Anything(theta=5e5)

    (refusal,) = MetaMaterializer(model, "cpu").refusals

    assert "model.table: expected Anything to keep its argument options" in refusal


def test_everything_that_is_missing_is_listed_and_nothing_was_changed() -> None:
    model = nn.ModuleList([on_meta(Rotary, 8, 5e5), on_meta(Forgetful, 8), on_meta(Listing)])

    (refusal,) = MetaMaterializer(model, "cpu").refusals

    assert [text.split(":")[0].strip() for text in refusal.splitlines()[1:-1]] == ["1.inv_freq", "2.tables"]
    assert model.get_buffer("0.inv_freq").is_meta


def test_a_table_that_was_set_by_hand_is_not_changed() -> None:
    model = on_meta(Forgetful, 8)
    mine: Tensor = torch.tensor([1.0, 0.5, 0.25, 0.125])
    model.inv_freq = mine

    MetaMaterializer(model, "cpu").apply()

    assert model.inv_freq is mine
