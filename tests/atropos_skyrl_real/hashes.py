"""Hashes of samples, made by those who send them and of what SkyRL trains."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

HASH_BYTES = 8


def digest(
    tokens: NDArray[np.int32], trains: NDArray[np.bool_], logprobs: NDArray[np.float32], score: float, reason: str
) -> bytes:
    """Return the hash of a sample: everything that SkyRL reads of it."""
    found = blake2b(tokens.tobytes(), digest_size=HASH_BYTES)
    for part in (trains.tobytes(), logprobs.tobytes(), np.float32(score).tobytes(), reason.encode()):
        found.update(part)
    return found.digest()
