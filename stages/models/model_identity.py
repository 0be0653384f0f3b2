"""The identity of a model in a folder: a continued run checks by it that it has the model that it began with.

It covers the configuration, the tokenizer and its template, byte by byte, and of each file of weights the size, the
header with the name, dtype, shape and place of each tensor, and 64 stretches of 4 KiB, spread evenly: two models of one
shape differ in nearly every stretch, and reading all of a large model takes minutes. One altered number between two
stretches is not noticed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash

from ..tokenizers.pretrained_tokenizer import FILES, TEMPLATES

SMALL = ("config.json", *FILES)
"""The files that are read as a whole, besides templates by name."""

WEIGHTS = ("*.safetensors", "*.bin")

HEADER_LENGTH = 8
"""Bytes at the beginning of a safetensors file with the length of its header."""

STRETCHES, STRETCH_BYTES = 64, 4096


def model_identity(folder: Path) -> dict[str, str]:
    """Return the digests of the small files, empty for one that is absent, and of all weights in `folder`. Blocks.

    Raises:
        OSError: a file cannot be read.
    """
    paths = {name: folder / name for name in SMALL}
    small = {
        name: xxhash.xxh3_128_hexdigest(path.read_bytes()) if path.is_file() else "" for name, path in paths.items()
    }
    templates = xxhash.xxh3_128()
    for path in sorted((folder / TEMPLATES).glob("*.jinja")):
        templates.update(f"{path.name} {xxhash.xxh3_128_hexdigest(path.read_bytes())} ".encode())
    weights = xxhash.xxh3_128()
    for path in sorted(path for pattern in WEIGHTS for path in folder.glob(pattern)):
        weights.update(_digest_of_weights(path))
    return {**small, TEMPLATES: templates.hexdigest(), "weights": weights.hexdigest()}


def _digest_of_weights(path: Path) -> bytes:
    """Return a digest of the name, the size, the header and some stretches of a file of weights."""
    size = path.stat().st_size
    digest = xxhash.xxh3_128(f"{path.name} {size}".encode())
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            length = int.from_bytes(file.read(HEADER_LENGTH), "little")
            digest.update(file.read(min(length, size)))
        for place in np.linspace(0, max(0, size - STRETCH_BYTES), STRETCHES).astype(np.int64).tolist():
            file.seek(place)
            digest.update(file.read(STRETCH_BYTES))
    return digest.digest()
