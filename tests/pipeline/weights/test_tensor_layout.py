"""One layout of published tensors, that of safetensors, wherever they lie."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch import nn

from penstock._pipeline.weights.tensor_layout import LENGTH, TensorLayout, WritePlan
from penstock._pipeline.weights.tensor_manifest import manifest_of
from penstock._pipeline.weights.weight_memory import bytes_of
from penstock._pipeline.weights.weight_specs import DTYPES, Tensor, TensorManifest, TensorSpec
from penstock._pipeline.weights.weights import WeightReader, WeightWriter
from penstock.torch import WeightFolder
from penstock.weights import FusedTensor


def content(tensors: dict[str, Tensor], plan: WritePlan) -> bytes:
    """Return the header and the bytes after it."""
    pieces = (bytes_of(tensor, spec.dtype).tobytes() for _, tensor, spec in plan.pieces(tensors))
    return plan.layout.header + b"".join(pieces)


def test_the_safetensors_library_reads_tensors_of_every_dtype() -> None:
    tensors: dict[str, Any] = {name: torch.ones(3, 5).to(getattr(torch, name)) for name in DTYPES}
    tensors |= {"scalar": torch.tensor(4), "empty": torch.zeros(2, 0)}

    loaded = load(content(tensors, WritePlan(manifest_of(tensors))))

    assert {name: (t.dtype, t.shape) for name, t in loaded.items()} == {
        name: (t.dtype, t.shape) for name, t in tensors.items()
    }
    assert all(torch.equal(loaded[name].double(), tensor.double()) for name, tensor in tensors.items())


def test_tensors_that_fill_cache_lines_begin_on_one_and_the_others_at_a_multiple_of_their_elements() -> None:
    shapes = {"a": (7,), "b": (16, 4), "c": (3, 3), "d": (32,), "e": (1,), "f": (0,), "g": (9, 64)}
    specs = [TensorSpec(name + dtype, dtype, shape) for name, shape in shapes.items() for dtype in DTYPES]

    layout = TensorLayout(TensorManifest((*specs,)))

    assert len(layout.header) % 64 == 0
    assert layout.nbytes == sum(spec.nbytes for spec in specs), "there are no gaps"
    for spec in specs:
        assert layout.offsets[spec.name] % (DTYPES[spec.dtype].nbytes if spec.nbytes % 64 else 64) == 0


class Model(nn.Module):
    """Tied weights, parts of a fused tensor, and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.token.weight
        self.k, self.q = nn.Linear(3, 1), nn.Linear(3, 2)
        self.register_buffer("table", torch.ones(2), persistent=False)


FUSED = [FusedTensor("qk.*", ("q.*", "k.*"))]


def test_a_header_describes_the_tensors_completely() -> None:
    layout = WritePlan(manifest_of(Model()), FUSED, {"float32": "bfloat16"}).layout

    parsed = TensorLayout.parse(layout.header[LENGTH.size :])

    assert parsed.header == layout.header
    assert parsed.offsets == layout.offsets
    assert {*parsed.manifest.tensors} == {*layout.manifest.tensors}
    assert parsed.manifest.tables == layout.manifest.tables
    assert TensorSpec("head.weight", "bfloat16", (5, 3), "token.weight") in parsed.manifest.tensors


def in_shared_memory(model: Model) -> bytes:
    writer = WeightWriter(WritePlan(manifest_of(model), FUSED))
    writer.write(model.state_dict(), 1)
    reader = WeightReader(writer.fd, writer.nbytes, writer.generation)
    shared = os.pread(writer.fd, reader.layout.nbytes, reader.tensors(1).start)
    writer.close()
    return reader.layout.header + shared


async def test_a_version_is_the_same_bytes_in_shared_memory_and_in_a_folder(tmp_path: Path) -> None:
    model = Model()
    shared = await anyio.to_thread.run_sync(in_shared_memory, model)

    async with WeightFolder(tmp_path, model, fused=FUSED) as publisher:
        await publisher.publish(model.state_dict(), 1)
    file = (tmp_path / "step-00000001" / "weights.safetensors").read_bytes()

    assert shared == file
    assert torch.equal(load(file)["qk.weight"], torch.cat([model.q.weight, model.k.weight]).detach())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": {"dtype": "C64"}}, "x: expected a shape, and a dtype among"),
        ({"x": {"shape": [-4, -1]}}, "x: expected a shape, and a dtype among"),
        ({"x": {"shape": "4"}}, "Expected `array`, got `str`"),
        ({"x": {"data_offsets": [0, 8]}}, "expected tensors without gaps"),
        ({"x": {"data_offsets": [16, 32]}}, "expected tensors without gaps"),
        ({"x": {"data_offsets": [-16, 0]}}, "expected tensors without gaps"),
        ({"__metadata__": {"penstock": '{"tied": {"y": "nobody"}, "tables": null}'}}, "y: expected another name of"),
        ({"__metadata__": {"penstock": '{"tied": {"x": "x"}, "tables": null}'}}, "x: expected another name of"),
        ({"__metadata__": {"penstock": "{"}}, "Input data was truncated"),
        ({"__metadata__": {"penstock": "{}"}}, "missing required field `tied`"),
        ({"__metadata__": {"penstock": 3}}, "Expected `str`, got `int`"),
    ],
)
def test_a_header_of_tensors_that_cannot_be_is_refused(change: dict[str, dict[str, Any]], message: str) -> None:
    layout = TensorLayout(manifest_of({"x": np.zeros(4, np.float32)}))
    header = msgspec.json.decode(layout.header[LENGTH.size :])
    changed = header | {name: header[name] | fields for name, fields in change.items()}

    with pytest.raises(ValueError, match=message):
        TensorLayout.parse(msgspec.json.encode(changed))
