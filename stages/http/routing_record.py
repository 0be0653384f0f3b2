"""The experts of a mixture in the answer of an inference server: strings to arrays. Does no I/O, and unpickles nothing.

vLLM (started with --enable-return-routed-experts) returns `choices[].routed_experts`, an .npy file in base64: [T − 1,
layers, chosen] of uint8 or uint16, int32 in some versions; /v1/completions has it only without a stream. SGLang
(started with the same option, and asked by `return_routed_experts`) returns `sglext.routed_experts`, the bytes of such
an array of int32 in base64, without a header. Both have a row for each layer of the model, zeros where a layer has no
experts, and none for the last of the T tokens of prompt and completion, which the model did not read.
"""

from __future__ import annotations

import binascii
import re
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..._pipeline.errors import ProtocolMismatch
from ..contracts.routed_experts import RoutedExperts

MAGIC = b"\x93NUMPY\x01\x00"
"""The beginning of a file of numpy's format 1.0, before the length of its header in two bytes."""

LONGEST_HEADER = 1024
"""Bytes before the data of an .npy file: numpy writes 128."""

HEADER = re.compile(
    rb"\{'descr': '([|<][ui][124])', 'fortran_order': False, 'shape': \((\d{1,9}), (\d{1,9}), (\d{1,9})\), \} *\n"
)
"""The header as numpy writes it; it is compared, not evaluated."""

DTYPES = {code: np.dtype(code) for code in ("|u1", "<u2", "<i4")}

BASE64_BYTES = 4 / 3
"""Characters of a byte."""


class RoutingRecord(NamedTuple):
    """A record as it arrived."""

    encoded: str
    has_header: bool
    """True for an .npy file, false for int32 without a header."""

    def decode(self, shape: RoutedExperts, tokens: int) -> NDArray[Any]:
        """Return [tokens − 1, layers, chosen] of uint8, or uint16 above 256 experts.

        Raises:
            ProtocolMismatch: it is no such record, of another shape, or has experts that the model lacks.
        """
        if len(self.encoded) > longest(shape, tokens):
            raise _mismatch(f"at most {longest(shape, tokens)} characters", f"{len(self.encoded)}")
        try:
            data = binascii.a2b_base64(self.encoded, strict_mode=True)
        except (binascii.Error, ValueError) as error:
            raise _mismatch("base64", str(error)) from None
        expected = (tokens - 1, shape.layers, shape.chosen)
        flat = _of_npy(data, expected) if self.has_header else _of_bytes(data, np.dtype("<i4"), expected)
        if flat.size and (flat.min() < 0 or flat.max() >= shape.experts):
            raise _mismatch(f"experts from 0 to {shape.experts - 1}", f"{flat.min()} to {flat.max()}")
        return flat.reshape(expected).astype(np.uint8 if shape.experts <= 2**8 else np.uint16)


def longest(shape: RoutedExperts, tokens: int) -> int:
    """Return the bound on the characters of a record of so many tokens."""
    return int(BASE64_BYTES * (4 * tokens * shape.layers * shape.chosen + LONGEST_HEADER))


def _of_npy(data: bytes, expected: tuple[int, ...]) -> NDArray[Any]:
    """Return the items of an .npy file of this shape."""
    begin = len(MAGIC) + 2
    end = begin + int.from_bytes(data[len(MAGIC) : begin], "little")
    header = HEADER.fullmatch(data[begin:end])
    if not data.startswith(MAGIC) or header is None or (dtype := DTYPES.get(header[1].decode())) is None:
        raise _mismatch("an .npy file of u1, u2 or i4 with three axes", repr(data[: begin + 80]))
    found = tuple(map(int, header.groups()[1:]))
    if found != expected:
        raise _mismatch(f"shape {list(expected)} (tokens − 1, layers, chosen)", f"{list(found)}")
    return _of_bytes(data[end:], dtype, expected)


def _of_bytes(data: bytes, dtype: np.dtype[Any], expected: tuple[int, ...]) -> NDArray[Any]:
    """Return the items of an array of this shape."""
    nbytes = int(np.prod(expected, dtype=np.int64)) * dtype.itemsize
    if len(data) != nbytes:
        raise _mismatch(f"{nbytes} bytes of {dtype.str}, for shape {list(expected)}", f"{len(data)}")
    return np.frombuffer(data, dtype)


def _mismatch(expected: str, got: str) -> ProtocolMismatch:
    return ProtocolMismatch(
        f"routed_experts: expected {expected}, got {got}: give HttpPolicy.routed_experts as in the model's config.json"
    )
