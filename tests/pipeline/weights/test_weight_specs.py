from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from penstock._pipeline.weights.tensor_layout import WritePlan
from penstock._pipeline.weights.weight_copies import CopiedModel, PrivateCopy
from penstock._pipeline.weights.weight_specs import Tensor, TensorManifest, TensorSpec, fitted, packed, specs_of
from penstock._pipeline.weights.weights import WeightReader, WeightWriter
from penstock.errors import WeightsMismatch
from penstock.weights import FusedTensor

QKV = FusedTensor("layers.*.qkv.weight", ("layers.*.q.weight", "layers.*.k.weight", "layers.*.v.weight"))


def rows(*counts: int, first: float = 0) -> dict[str, Tensor]:
    """Return q, k and v of layer 0, with so many rows; the values count up."""
    values = np.arange(first, first + 4 * sum(counts), dtype=np.float32).reshape(-1, 4)
    parts = np.split(values, np.cumsum(counts)[:-1])
    return {f"layers.0.{name}.weight": part for name, part in zip("qkv", parts, strict=True)}


def planned(tensors: dict[str, Tensor], **how: object) -> WritePlan:
    return WritePlan(TensorManifest(specs_of(tensors)), **how)  # type: ignore[arg-type]


def wire_type(published: dict[str, Tensor], model: dict[str, Tensor], **how: object) -> None:
    """Publish, and read into `model`; `fused` is the reader's, the rest the publisher's."""
    split = how.pop("split", ())
    plan = planned(published, **how)
    writer = WeightWriter(plan)
    try:
        plan.check(published, 1, newest=0)
        writer.write(published, 1)
        reader = WeightReader(writer.fd, writer.nbytes, writer.generation)
        target = CopiedModel(model, reader.layout.manifest, split, "weights")  # type: ignore[arg-type]
        copy = PrivateCopy(reader, "weights").read()
        assert copy is not None
        target.load(copy[1])
    finally:
        writer.close()


def test_parts_are_published_as_the_whole_that_a_model_has() -> None:
    model: dict[str, Tensor] = {"layers.0.qkv.weight": np.zeros((8, 4), np.float32)}

    wire_type(rows(4, 2, 2), model, fused=[QKV])

    assert np.asarray(model["layers.0.qkv.weight"]).ravel().tolist() == list(range(32))


def test_a_whole_that_is_published_is_split_into_the_parts_that_a_model_has() -> None:
    model = rows(4, 2, 2, first=1000)
    whole = np.arange(32, dtype=np.float32).reshape(8, 4)

    wire_type({"layers.0.qkv.weight": whole}, model, split=[QKV])

    assert [np.asarray(part).ravel()[0] for part in model.values()] == [0, 16, 24]
    assert np.concatenate([np.asarray(part) for part in model.values()]).tolist() == whole.tolist()


def test_what_is_the_same_on_both_sides_needs_no_splitting() -> None:
    model = rows(4, 2, 2, first=1000)

    wire_type(rows(4, 2, 2), model, split=[QKV])

    assert np.asarray(model["layers.0.v.weight"]).ravel()[0] == 24


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"layers.0.q.weight": (4, 4), "layers.0.k.weight": (2, 4)}, "layers.0.v.weight none"),
        ({"layers.0.q.weight": (4, 4), "layers.0.k.weight": (2, 5), "layers.0.v.weight": (2, 4)}, "float32 [2, 5]"),
        (
            {f"layers.0.{name}.weight": (2, 4) for name in ("q", "k", "v", "qkv")},
            "expected to be made of parts, found float32 [2, 4] already",
        ),
        ({"other": (1,)}, "expected tensors named layers.*.q.weight, layers.*.k.weight, layers.*.v.weight, found none"),
    ],
    ids=["absent", "other columns", "whole already", "no layer"],
)
def test_parts_that_make_no_whole_are_refused(given: dict[str, tuple[int, ...]], found: str) -> None:
    specs = [TensorSpec(name, "float32", shape) for name, shape in given.items()]

    with pytest.raises(WeightsMismatch, match=re.escape(found)):
        packed(specs, [QKV], "weights")


def test_rows_that_do_not_add_up_are_listed_with_everything_else_that_differs() -> None:
    model = [*specs_of(rows(4, 2, 2)), TensorSpec("norm", "float32", (4,))]
    published = [TensorSpec("layers.0.qkv.weight", "float32", (9, 4)), TensorSpec("norm", "bfloat16", (4,))]

    with pytest.raises(WeightsMismatch) as caught:
        fitted(model, published, [QKV], "weights")

    assert str(caught.value).splitlines()[1:] == [
        "  layers.0.qkv.weight: expected float32 [8, 4], found float32 [9, 4]",
        "  norm: expected float32 [4], found bfloat16 [4]",
    ]


def test_tied_tensors_lie_in_the_segment_once() -> None:
    token = torch.ones(1000, 100)
    tied, apart = planned({"a": token, "b": token}), planned({"a": token, "b": token + 1})

    assert tied.layout.nbytes == apart.layout.nbytes / 2


def test_tensors_that_were_one_must_stay_one() -> None:
    token = np.ones((2, 2), np.float32)
    plan = planned({"a": token, "b": token})

    with pytest.raises(WeightsMismatch, match="b: expected one tensor with a, found another"):
        plan.check({"a": token, "b": token.copy()}, 1, newest=0)


def test_what_the_model_ties_must_be_tied_where_it_comes_from() -> None:
    token = torch.ones(2, 2)
    published = specs_of({"embed": token, "head": token.clone()})

    with pytest.raises(WeightsMismatch, match="head: expected one tensor with embed, found another"):
        fitted(specs_of({"embed": token, "head": token}), published, (), "weights")


def test_what_is_tied_where_it_comes_from_may_be_two_in_the_model() -> None:
    token = np.full((2, 2), 7, np.float32)
    model: dict[str, Tensor] = {"embed": np.zeros((2, 2), np.float32), "head": np.zeros((2, 2), np.float32)}

    wire_type({"embed": token, "head": token}, model)

    assert np.asarray(model["head"]).tolist() == token.tolist()


@pytest.mark.parametrize("given", [torch.linspace(-3, 3, 12), np.linspace(-3, 3, 12, dtype=np.float32)])
def test_a_cast_that_is_spelled_out_is_torchs_own(given: Tensor) -> None:
    model: dict[str, Tensor] = {"x": torch.zeros(12, dtype=torch.bfloat16), "step": torch.zeros(1, dtype=torch.int64)}

    wire_type({"x": given, "step": np.array([5])}, model, cast={"float32": "bfloat16"})

    assert torch.equal(torch.as_tensor(model["x"]), torch.as_tensor(given).to(torch.bfloat16))
    assert int(model["step"][0]) == 5


def test_nothing_is_cast_that_was_not_spelled_out() -> None:
    model: dict[str, Tensor] = {"x": torch.zeros(3, dtype=torch.bfloat16)}

    with pytest.raises(WeightsMismatch, match=r"x: expected bfloat16 \[3\], found float32 \[3\]"):
        wire_type({"x": torch.zeros(3)}, model)

    assert torch.equal(torch.as_tensor(model["x"]), torch.zeros(3, dtype=torch.bfloat16))


@pytest.mark.parametrize("cast", [{"float32": "float15"}, {"single": "bfloat16"}])
def test_a_cast_of_dtypes_that_do_not_travel_is_refused(cast: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"cast: expected dtypes among .*, got"):
        planned({"x": np.zeros(1, np.float32)}, cast=cast)
