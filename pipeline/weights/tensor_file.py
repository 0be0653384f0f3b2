"""The content of a safetensors file, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .tensor_layout import WritePlan
from .weight_memory import bytes_of
from .weight_specs import Tensor


def contents_of(tensors: Mapping[str, Tensor], plan: WritePlan) -> Iterator[bytes | memoryview]:
    """Yield the content of the file: the header, then the bytes of each tensor, which is read once, when it is due."""
    yield plan.layout.header
    for _, tensor, spec in plan.pieces(tensors):
        yield bytes_of(tensor, spec.dtype).data
